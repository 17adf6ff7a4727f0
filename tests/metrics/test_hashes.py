"""What hashes.jsonl says of a step, whoever made which sample."""

from __future__ import annotations

import json

import pytest
import torch

from omnirl_hpc.metrics.hashes import StepHashes
from omnirl_hpc.run_directory import RunDirectory
from omnirl_hpc.sampling.samples import Media, SampleIdentity, Samples, Trajectory
from omnirl_hpc.sampling.streams import LATENTS
from tests.helpers import one_rank_group, run_ranks

PARTS = ["noise", "embeddings", "latents", "log_probs", "images", "rewards", "advantages"]


def batch(seed: int = 0, size: int = 4) -> Samples:
    """`size` samples of two groups."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(size, *shape, generator=generator)  # noqa: E731
    trajectory = Trajectory(
        latents={LATENTS: draw(2, 3, 2)},
        log_probs=draw(1),
        sigmas={LATENTS: draw(2)},
        timesteps={LATENTS: draw(1)},
        sigma_max={LATENTS: draw()},
    )
    return Samples(
        identity=[SampleIdentity(0, 3, str(i // 2), i % 2) for i in range(size)],
        group=torch.arange(size) // 2,
        conditions=[{"embeds": embeds, "mask": torch.ones(3, dtype=torch.bool)} for embeds in draw(3, 2)],
        negative=None,
        clean={LATENTS: draw(3, 2)},
        version=torch.zeros(size, dtype=torch.int64),
        noise_hash=torch.randint(0, 2**62, (size,), generator=generator),
        media=Media(torch.randint(0, 256, (size, 1, 3, 4, 4), dtype=torch.uint8, generator=generator)),
        trajectory=trajectory,
    )


def written(folder, made: Samples, rewards=None, rank: int = 0) -> dict[str, str]:
    rewards = torch.arange(4.0) if rewards is None else rewards
    folder.mkdir()
    run = RunDirectory(folder)
    StepHashes(run, rank, enabled=True).rollout(3, made, rewards, rewards - 1)
    return {line["tensor"]: line["hash"] for line in map(json.loads, run.hashes.read_text().splitlines())}


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank_group():
        yield


def test_each_tensor_of_each_phase_has_a_line(tmp_path):
    hashes = StepHashes(RunDirectory(tmp_path), rank=0, enabled=True)
    hashes.rollout(3, batch(), torch.arange(4.0), torch.arange(4.0))
    hashes.gradients(3, 1, lambda: [("a", torch.ones(2))])
    hashes.actor(3, lambda: [("a", torch.ones(2))], lambda: [("a.exp_avg", torch.ones(2))])
    lines = [json.loads(line) for line in (tmp_path / "hashes.jsonl").read_text().splitlines()]
    assert [line["tensor"] for line in lines] == [*PARTS, "gradients", "weights", "optimizer"]
    assert [line["phase"] for line in lines] == ["rollout"] * 5 + ["reward"] * 2 + ["update_1"] + ["end"] * 2
    assert {line["step"] for line in lines} == {3}
    assert all(len(line["hash"]) == 16 and int(line["hash"], 16) >= 0 for line in lines)


def test_where_they_are_not_wanted_nothing_is_computed_or_written(tmp_path):
    hashes = StepHashes(RunDirectory(tmp_path), rank=0, enabled=False)

    def never():
        raise AssertionError("gathered full tensors for nothing")

    hashes.rollout(0, None, None, None)
    hashes.gradients(0, 0, never)
    hashes.actor(0, never, never)
    assert not (tmp_path / "hashes.jsonl").exists()


def test_only_rank_0_writes(tmp_path):
    StepHashes(RunDirectory(tmp_path), rank=1, enabled=True).rollout(
        0, batch(), torch.zeros(4), torch.zeros(4)
    )
    assert not (tmp_path / "hashes.jsonl").exists()


def test_the_order_of_samples_does_not_matter_and_who_is_who_does(tmp_path):
    made = batch()
    expected = written(tmp_path / "a", made)
    assert written(tmp_path / "b", made[torch.tensor([2, 0, 3, 1])]) == expected
    exchanged = batch()
    exchanged.identity.reverse()  # the same tensors under other identities
    other = written(tmp_path / "c", exchanged)
    assert all(other[name] != expected[name] for name in PARTS[:5])


@pytest.mark.parametrize("name", ["latents", "log_probs", "images", "noise_hash"])
def test_one_bit_of_one_sample_shows_in_its_own_line_alone(tmp_path, name):
    made, changed = batch(), batch()
    tensor = {
        "latents": changed.trajectory.latents[LATENTS],
        "log_probs": changed.trajectory.log_probs,
        "images": changed.media.frames,
        "noise_hash": changed.noise_hash,
    }[name]
    flat = tensor[2].view(-1) if tensor.dim() > 1 else tensor[2:3]
    flat[:1] = torch.nextafter(flat[:1], flat[:1] + 1) if tensor.is_floating_point() else flat[:1] ^ 1
    a, b = written(tmp_path / "a", made), written(tmp_path / "b", changed)
    assert [part for part in PARTS if a[part] != b[part]] == [{"noise_hash": "noise"}.get(name, name)]


def test_a_reward_that_is_nan_has_a_hash_like_any_other(tmp_path):
    nan = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    assert written(tmp_path / "a", batch(), nan) == written(tmp_path / "b", batch(), nan.clone())


def hashes_of_a_rank(folder) -> None:
    rank = torch.distributed.get_rank()
    made = batch()[[1, 2] if rank else [3, 0]]
    StepHashes(RunDirectory(folder), rank, enabled=True).rollout(
        3, made, torch.arange(4.0), torch.arange(4.0) - 1
    )


def test_two_ranks_write_what_one_writes(tmp_path):
    run_ranks(2, hashes_of_a_rank, tmp_path)
    written(tmp_path / "one", batch())
    assert (tmp_path / "hashes.jsonl").read_text() == (tmp_path / "one/hashes.jsonl").read_text()
