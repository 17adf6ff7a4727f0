"""What an algorithm learns from: parts of a reward are mixed, groups that teach nothing are replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from omnirl_hpc.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from omnirl_hpc.config.schema import (
    ActorConfig,
    Config,
    DataConfig,
    LoggingConfig,
    RewardConfig,
    RewardPartConfig,
    SamplingConfig,
)
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.rewards.gather import ScoredStep
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sources.rollout import RolloutSource, learned_rewards
from tests.helpers import ALONE, CPU, go_on

# Of prompt p…: whether the rewards of its samples differ.
TEACHES = {"p0": True, "p1": False, "p2": False, "p3": True, "p4": False, "p5": True, "p6": True, "p7": True}


class Family:
    spec = SimpleNamespace(text_width=None)
    count_text_tokens = staticmethod(len)

    def condition_width(self, texts, widths):
        return 8

    def schedules(self, num_steps):
        return {}


class Engine:
    """As much of Generation as the source asks: samples whose rewards their prompt decides."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.rounds = layout, []
        self.engine = SimpleNamespace(micro_batch_size=8)

    def width(self, config, groups):
        return 8

    def requests(self, config, step, groups, window, **options):
        condition = lambda prompt: {"embeds": torch.zeros(1)}  # noqa: E731
        return make_requests(config, Family(), condition, self.layout, step, groups, window, **options)

    def roll_out(self, requests, groups, check_stop, media):
        check_stop()
        self.rounds.append([request.identity.prompt_id for request in requests[::2]])
        return Samples(
            identity=[request.identity for request in requests],
            group=torch.tensor([request.group for request in requests]),
            conditions=[request.condition for request in requests],
            negative=None,
            clean={LATENTS: torch.tensor([[number(request.identity)] for request in requests])},
            version=torch.zeros(len(requests), dtype=torch.int64),
            noise_hash=torch.zeros(len(requests), dtype=torch.int64),
        )

    def score(self, samples, config):
        """Of one rank alone."""
        rewards = [float(who.sample % 2 and TEACHES[who.prompt_id]) for who in samples.identity]
        count = len(samples)
        return ScoredStep(
            torch.tensor(rewards).double(),
            {},
            torch.ones(count, dtype=torch.bool),
            samples.place,
            torch.arange(count),
            0.0,
        )


def number(who: SampleIdentity) -> float:
    return float(who.prompt_id[1:]) + who.sample / 10


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Prompts in the order of the table, four in a step, two samples of each."""
    monkeypatch.setattr("omnirl_hpc.data.sampler._permutation", lambda seed, epoch, size: range(size))
    table = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": list(TEACHES), "id": list(TEACHES)}), table)

    def build(rounds: int):
        config = Config(
            data=DataConfig(str(table), prompts_per_step=4, samples_per_prompt=2, refill_rounds=rounds),
            sampling=SamplingConfig(true_cfg_scale=1.0),
            actor=ActorConfig(updates_per_step=2),
            algorithm=DiffusionNFTConfig(),
            reward=RewardConfig({"jpeg": RewardPartConfig("jpeg_compressibility")}),
            logging=LoggingConfig(samples_every=0),
        )
        made = Engine(ALONE)
        hashes = StepHashes(None, 0, enabled=False)
        arguments = (config, Family(), ALONE, CPU, DiffusionNFT(config), made, PhaseTimer(CPU), hashes, None)
        return RolloutSource(*arguments), made

    return build


def prompts(given) -> list[str]:
    return [who.prompt_id for who in given.batch.units.identity[::2]]


def test_without_it_groups_stay_and_count(source):
    made, engine = source(rounds=0)
    given = made.next(0, go_on)
    assert prompts(given) == ["p0", "p1", "p2", "p3"] and given.batch.weights.tolist() == [1 / 4] * 8
    assert engine.rounds == [["p0", "p1", "p2", "p3"]] and made.state_dict()["cursor"] == 4
    assert "reward/refilled_groups" not in given.metrics


def test_groups_are_replaced_in_their_places_until_the_rounds_are_over(source):
    """p1 and p2 by p4 and p5, and p4, which teaches nothing either, by p6."""
    made, engine = source(rounds=2)
    given = made.next(0, go_on)
    assert engine.rounds == [["p0", "p1", "p2", "p3"], ["p4", "p5"], ["p6"]]
    assert prompts(given) == ["p0", "p6", "p5", "p3"]
    assert given.batch.units.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert given.batch.units.clean[LATENTS].flatten().tolist() == pytest.approx(
        [0, 0.1, 6, 6.1, 5, 5.1, 3, 3.1]
    )
    assert given.batch.advantages.tolist()[:2] == pytest.approx([-0.935, 0.935], abs=1e-3)
    assert given.batch.weights.tolist() == [1 / 4] * 8
    assert made.state_dict()["cursor"] == 7  # the next step starts with p7
    # the mean of the prompts as they come: 2 of 4 groups have a mean of 1/2
    assert given.metrics["reward/mean"] == 0.25 and given.metrics["reward/zero_std_groups"] == 2
    assert given.metrics["reward/refilled_groups"] == 3


def test_what_still_teaches_nothing_leaves_the_mean(source):
    made, engine = source(rounds=1)
    given = made.next(0, go_on)
    assert prompts(given) == ["p0", "p4", "p5", "p3"] and made.state_dict()["cursor"] == 6
    # the first update has one group that counts, the second two
    assert given.batch.weights.tolist() == [1 / 2] * 2 + [0] * 2 + [1 / 4] * 4


def test_another_number_of_ranks_asks_for_the_same_groups():
    """Each replica makes those of its own that are to be replaced."""
    config = Config(data=DataConfig("-", prompts_per_step=4, samples_per_prompt=2))
    groups = [
        SimpleNamespace(index=i, prompt=SimpleNamespace(id=f"p{i}", prompt=""), first_sample=0)
        for i in range(4)
    ]
    config.sampling.true_cfg_scale = 1.0

    def asked(ranks: int) -> list[str]:
        made = []
        for rank in range(ranks):
            layout = Layout(rank, ranks, 1, ranks)
            condition = lambda prompt: {}  # noqa: E731
            some = make_requests(config, Family(), condition, layout, 0, groups, None, width=8, only=[1, 3])
            made += [(r.group, r.identity.sample) for r in some]
        return sorted(made)

    assert asked(1) == asked(2) == asked(4) == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_parts_are_mixed_as_the_settings_say():
    """Two scores of very different scale and opposite order: added up, the large one decides; normalised in
    their group they cancel out but for their weights.
    """
    parts = {"large": torch.tensor([100.0, 300.0]).double(), "small": torch.tensor([0.2, 0.1]).double()}
    rewards = parts["large"] + 3 * parts["small"]
    groups, mask = torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool)
    scored = ScoredStep(rewards, parts, mask, groups, torch.arange(2), 0.0)
    weights = {"large": RewardPartConfig(), "small": RewardPartConfig(weight=3.0)}
    assert torch.equal(learned_rewards(scored, RewardConfig(weights)), rewards)
    mixed = learned_rewards(scored, RewardConfig(weights, mix="normalized"))
    # each part is -+ 1/sqrt(2): large -.707, +.707; small 3 x (+.707, -.707), but for 1e-4 beside a deviation
    assert mixed.tolist() == pytest.approx([2**0.5, -(2**0.5)], rel=0.01)
