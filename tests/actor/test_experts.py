"""Two networks that take turns: which one a point is evaluated with, trained, synced and saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.config.load import load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import MismatchError
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.spec import Numerics
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.sync import make_sync
from tests.helpers import ALONE, CPU, fill_adapter, one_rank_group, run_ranks
from tests.toy_experts import BOUNDARY, ToyExperts, write_toy_experts

EARLY, LATE = BOUNDARY, BOUNDARY - 1


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("experts")
    write_toy_experts(folder)
    settings = ("model.height=4", "model.width=4", "actor.lora.rank=2", "actor.dtype=float32")
    paths = (f"model.path={folder}", "run_dir=-", "data.prompts=-", "recipe=flowgrpo_tiny")
    return load_config([*paths, "model=tests.toy_experts:ToyExperts", *settings]).config


def point(*timesteps: float) -> TrainingPoint:
    size, generator = len(timesteps), torch.Generator().manual_seed(0)
    shapes = {"video": (4, 3, 2, 2), "audio": (2, 5)}
    times = torch.tensor(timesteps)
    return TrainingPoint(
        latents={name: torch.randn(size, *shape, generator=generator) for name, shape in shapes.items()},
        timesteps={"video": times, "audio": times - 500},
        conditions={"text": torch.randn(size, 6, 16, generator=generator)},
        negative=None,
        weights=torch.ones(size),
    )


def plain(config: Config, name: str, where: TrainingPoint):
    """What one network of the checkpoint predicts."""
    family = ToyExperts(config.model)
    network = family.load_transformer(torch.float32, name)
    arguments = (where.latents, where.timesteps, where.conditions, None)
    with torch.no_grad():
        return family.velocity(network, *arguments, family.guidance(config.sampling), Numerics())


def test_the_timestep_decides_which_network_predicts_and_learns(config):
    with one_rank_group():
        actor = FSDPActor(config, ToyExperts(config.model), ALONE, CPU)
        names = {name for name, _ in actor.weights()}
        second = {name for name in names if name.startswith("transformer_2.")}
        assert {f"transformer_2.{name}" for name in names - second} == second and len(names) == 16
        for timestep, network, learns in (
            (EARLY, "transformer", names - second),
            (LATE, "transformer_2", second),
        ):
            where = point(timestep, timestep)
            made = actor.velocity(where, CURRENT)
            for stream, expected in plain(config, network, where).items():
                torch.testing.assert_close(made[stream].detach(), expected, rtol=1e-5, atol=1e-6)
            sum(tensor.square().mean() for tensor in made.values()).backward()
            moved = {name for name, gradient in actor.gradients() if gradient.any()}
            assert moved and moved <= learns
            before = {name: tensor.clone() for name, tensor in actor.weights()}
            actor.apply_gradients()
            changed = {name for name, t in actor.weights() if not torch.equal(t, before[name])}
            assert moved <= changed <= learns  # the decay of weights moves A as well


def test_the_reference_leaves_both_adapters_out(config):
    with one_rank_group():
        actor = FSDPActor(config, ToyExperts(config.model), ALONE, CPU)
        for network in actor._networks.values():
            fill_adapter(network, seed=1)
        for timestep, network in ((EARLY, "transformer"), (LATE, "transformer_2")):
            where = point(timestep)
            expected = plain(config, network, where)["video"]
            with torch.no_grad():
                torch.testing.assert_close(actor.velocity(where, REFERENCE)["video"], expected)
                assert not torch.allclose(actor.velocity(where, CURRENT)["video"], expected)


def test_samples_of_both_in_one_micro_step_are_refused(config):
    with one_rank_group():
        actor = FSDPActor(config, ToyExperts(config.model), ALONE, CPU)
        with pytest.raises(MismatchError, match="belong to transformer and to transformer_2, .*per=step$"):
            actor.velocity(point(EARLY, LATE), CURRENT)


def on_two_ranks(config: Config) -> list[str]:
    """A rank at the one and a rank at the other; then both at the same, with gradients."""
    rank = dist.get_rank()
    actor = FSDPActor(config, ToyExperts(config.model), Layout(rank, 2, 1, 2), CPU)
    said = []
    try:
        actor.velocity(point((EARLY, LATE)[rank]), CURRENT)
    except MismatchError as error:
        said.append(str(error))
    for timestep in (LATE, EARLY):
        made = actor.velocity(point(timestep), CURRENT)
        sum(tensor.square().mean() for tensor in made.values()).backward()
    norm, _ = actor.apply_gradients()
    return [*said, f"{norm:.6f}"]


def test_ranks_never_train_two_at_a_time(config):
    first, second = run_ranks(2, on_two_ranks, config)
    assert first == second and len(first) == 2 and "transformer_2" in first[0] and float(first[1]) > 0


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_engine_gets_both(config, train):
    settings = [f"actor.train={train}", f"model.path={config.model.path}", "model.height=4", "model.width=4"]
    given = ["run_dir=-", "data.prompts=-", "recipe=flowgrpo_tiny", "model=tests.toy_experts:ToyExperts"]
    config = load_config([*given, *settings, "actor.lora.rank=2"]).config
    family = ToyExperts(config.model)
    with one_rank_group():
        actor = FSDPActor(config, family, ALONE, CPU)
        with torch.no_grad():
            for parameter in actor._parameters.values():
                parameter.add_(0.5)
        engine = DiffusersEngine(config, family, CPU, PhaseTimer(CPU))
        sync = make_sync(actor, engine, torch.float32)
        sync.send(CURRENT, 1)
        receipt = sync.confirm(1)
    of_both = {name.removeprefix("transformer_2.") for name in receipt.bound}
    assert len(receipt.bound) == 2 * len(of_both) > 0
