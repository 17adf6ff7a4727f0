"""The groups of a step become requests: whose text, which samples, which window, how wide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omnirl_hpc.algorithms.flow_grpo import FlowGRPOConfig
from omnirl_hpc.config.schema import Config, DataConfig, SamplingConfig, WindowConfig
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.data.sampler import Group
from omnirl_hpc.errors import DataError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.sampling.windows import draw_window

# One token a letter. The third has a negative prompt of its own, and its group is the prompt's second in the
# step.
GROUPS = [
    Group(0, Prompt("a", "cat"), 0),
    Group(1, Prompt("b", "a zebra"), 0),
    Group(2, Prompt("c", "dog", negative_prompt="blurred"), 2),
    Group(3, Prompt("d", "an elephant"), 0),
]


class Family:
    """As much of a family as requests ask."""

    spec = SimpleNamespace(text_width=None)
    count_text_tokens = staticmethod(len)
    condition_width = ModelFamily.condition_width


def encode(prompt: Prompt) -> dict[str, torch.Tensor]:
    return {"embeds": torch.tensor([[float(ord(letter))] for letter in prompt.prompt])}


def text(condition: dict[str, torch.Tensor]) -> str:
    return "".join(chr(int(value)) for value in condition["embeds"].flatten())


def config(scale: float = 4.0, **data) -> Config:
    return Config(
        data=DataConfig(samples_per_prompt=2, negative_prompt="bad", text_lengths=[4, 8, 12, 16], **data),
        sampling=SamplingConfig(
            num_inference_steps=10,
            true_cfg_scale=scale,
            window=WindowConfig(size=2, first=0, last=9, per="sample"),
        ),
        algorithm=FlowGRPOConfig(),
        seed=7,
    )


def make(config: Config, rank: int = 0, ranks: int = 1, groups=GROUPS):
    window = config.sampling.window
    return make_requests(config, Family(), encode, Layout(rank, ranks, 1, ranks), 5, groups, window)


def test_each_sample_is_asked_for_under_its_own_identity():
    made = make(config())
    who = [r.identity for r in made]
    identities = [(w.seed, w.step, r.group, w.prompt_id, w.sample) for w, r in zip(who, made)]
    samples = {"a": (0, 1), "b": (0, 1), "c": (2, 3), "d": (0, 1)}  # those of c count on from its first group
    assert identities == [(7, 5, i, prompt, s) for i, prompt in enumerate("abcd") for s in samples[prompt]]
    windows = [draw_window(config().sampling, 7, 5, w.prompt_id, w.sample) for w in who]
    assert [r.window for r in made] == windows and len(set(windows)) > 2


@pytest.mark.parametrize("shared", [True, False])
def test_the_samples_of_a_group_can_start_from_the_noise_of_its_first(shared):
    settings = config()
    settings.sampling.shared_noise = shared
    starts = [r.start and (r.start.prompt_id, r.start.sample) for r in make(settings)]
    groups = [("a", 0), ("b", 0), ("c", 2), ("d", 0)]  # of two samples each; c had a group before
    assert starts == ([group for group in groups for _ in range(2)] if shared else [None] * 8)
    without_steps = make_requests(settings, Family(), encode, Layout(0, 1, 1, 1), 5, GROUPS, None)
    assert [r.start for r in without_steps] == [None] * 8  # they would all be equal


def test_a_rows_own_negative_prompt_comes_before_the_settings():
    made = make(config())
    assert [text(r.condition) for r in made[::2]] == ["cat", "a zebra", "dog", "an elephant"]
    assert [text(r.negative) for r in made[::2]] == ["bad", "bad", "blurred", "bad"]


def test_without_guidance_there_is_no_negative_prompt_and_it_takes_no_room():
    made = make(config(scale=1.0), groups=GROUPS[2:3])
    assert [r.negative for r in made] == [None, None]
    assert {r.width for r in made} == {4}  # dog and one of padding
    assert {r.width for r in make(config(), groups=GROUPS[2:3])} == {8}  # blurred


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_pad_to_the_longest_prompt_of_the_step(rank):
    made = make(config(), rank, ranks=2)
    assert {r.group for r in made} == {rank, rank + 2}
    assert {r.width for r in made} == {12}  # an elephant, which is rank 1's


def test_a_prompt_that_is_too_long_names_its_row():
    long = Group(0, Prompt("e", "a very long prompt", place="table.parquet, row 4"), 0)
    with pytest.raises(DataError, match="table.parquet, row 4: no width in data.text_lengths"):
        make(config(), groups=[long])


@pytest.mark.parametrize(
    ("whole_groups", "owners"), [(False, [0, 1, 0, 1, 0, 1, 0, 1]), (True, [0, 0, 1, 1, 0, 0, 1, 1])]
)
def test_the_ranks_of_a_replica_take_turns(whole_groups, owners):
    """With samples, or with groups; the same where only some are asked for."""
    settings, layout = config(), Layout(0, 2, 2, 2)
    window = settings.sampling.window

    def ask(**options):
        given = (settings, Family(), encode, layout, 5, GROUPS, window)
        return make_requests(*given, whole_groups=whole_groups, **options)

    assert [request.owner for request in ask()] == owners
    assert [request.owner for request in ask(only=[1, 2])] == owners[2:6]
    assert {request.width for request in ask(width=64)} == {64}
