"""Samples as rows: chosen, and joined again."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.sampling.noise import INITIAL_NOISE, standard_normal
from omnirl_hpc.sampling.samples import Media, SampleIdentity, Samples, Trajectory, stack_conditions
from omnirl_hpc.sampling.streams import mean_over_streams


def make(count: int, first: int = 0) -> Samples:
    """Every tensor holds the sample's number; two neighbours share a condition."""
    numbers = torch.arange(first, first + count)
    shared = [{"embeds": torch.full((2,), float(i))} for i in range((count + 1) // 2)]
    return Samples(
        identity=[SampleIdentity(7, 3, str(number // 2), number % 2) for number in numbers.tolist()],
        group=numbers // 2,
        conditions=[shared[i // 2] for i in range(count)],
        negative=None,
        clean={"video": numbers[:, None].float(), "audio": -numbers[:, None, None].float()},
        version=numbers * 0,
        noise_hash=numbers,
        media=Media(numbers[:, None, None, None, None].byte(), audio=None, fps=24.0),
        trajectory=Trajectory(
            latents={"video": numbers[:, None, None].float(), "audio": numbers[:, None, None].float()},
            log_probs=numbers[:, None].float(),
            sigmas={},
            timesteps={},
            sigma_max={},
        ),
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, None, 2), [1, 3]),
        (torch.tensor([2, 0]), [2, 0]),
        ([3, 1], [3, 1]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
)
def test_rows_are_chosen_in_every_field(rows, expected):
    chosen = make(4)[rows]
    assert len(chosen) == len(expected)
    assert [identity.sample + 2 * int(identity.prompt_id) for identity in chosen.identity] == expected
    for tensor in (
        chosen.noise_hash,
        chosen.clean["video"].flatten(),
        -chosen.clean["audio"].flatten(),
        chosen.media.frames.flatten(),
        chosen.trajectory.latents["audio"].flatten(),
    ):
        assert tensor.tolist() == expected
    assert chosen.sample.tolist() == [number % 2 for number in expected]
    assert chosen.media.fps == 24.0 and chosen.negative is None


def test_parts_make_the_whole_and_conditions_stay_shared():
    whole = make(4)
    joined = Samples.cat([whole[:1], whole[1:]])
    assert joined.identity == whole.identity
    assert torch.equal(joined.clean["video"], whole.clean["video"])
    assert torch.equal(joined.media.frames, whole.media.frames)
    assert [id(condition) for condition in joined.conditions] == [id(c) for c in whole.conditions]
    assert len({id(condition) for condition in joined.conditions}) == 2
    assert stack_conditions(joined.conditions)["embeds"][:, 0].tolist() == [0, 0, 1, 1]


def test_videos_of_different_speeds_are_not_one_batch():
    slow, fast = make(2), make(2)
    fast.media.fps = 30.0
    with pytest.raises(ValueError, match=r"\[24.0, 30.0\] cannot be one"):
        Samples.cat([slow, fast])


def test_an_identity_addresses_the_draws_of_rollout():
    identity = SampleIdentity(seed=7, step=3, prompt_id="p", sample=1)
    drawn = standard_normal((4,), *identity.address(INITIAL_NOISE, "audio", 2))
    assert torch.equal(drawn, standard_normal((4,), 7, INITIAL_NOISE, 3, "p", 1, "audio", 2))


def test_the_mean_over_streams_is_that_of_all_elements():
    streams = {"video": torch.randn(2, 5, 3), "audio": torch.randn(2, 4)}
    means = {name: tensor.flatten(1).mean(1) for name, tensor in streams.items()}
    expected = torch.cat([tensor.flatten(1) for tensor in streams.values()], dim=1).mean(1)
    torch.testing.assert_close(mean_over_streams(means, streams), expected)
    alone = {"video": means["video"]}
    assert torch.equal(mean_over_streams(alone, streams), means["video"])  # to the bit
