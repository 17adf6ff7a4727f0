"""Requests become micro-batches of one shape; noise belongs to samples, not to places in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnirl_hpc.config.load import NO_PATHS, load_config
from omnirl_hpc.layout import make_layout
from omnirl_hpc.rollout import batching
from omnirl_hpc.rollout.batching import SampleBatch, describe_padding, micro_batches
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.noise import INITIAL_NOISE, TRANSITION_NOISE, standard_normal
from omnirl_hpc.sampling.recorder import Recording
from omnirl_hpc.sampling.samples import Condition, Media, SampleIdentity
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sampling.windows import Window
from tests.helpers import CPU

SHAPE = (6, 16)
SEED = 11


class Family:
    """As much of a family as batching asks: two streams of which one is the only one of most families, and
    conditions that are padded with zeros.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def stream_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def pad(self, condition: Condition, width: int) -> Condition:
        missing = width - len(condition["embeds"])
        return {"embeds": torch.nn.functional.pad(condition["embeds"], (0, 0, 0, missing))}


NEGATIVE = {"embeds": torch.full((1, 4), -1.0)}


def request(
    sample: int, prompt_id: str = "p", step: int = 3, start: int = 1, tokens: int = 5, size: int = 2
) -> SampleRequest:
    condition = {"embeds": torch.full((tokens, 4), 1.0 + sample)}
    identity = SampleIdentity(SEED, step, prompt_id, sample)
    return SampleRequest(identity, 0, Window(start, size), condition, NEGATIVE, width=8)


def batches(
    requests: list[SampleRequest], size: int, **shapes: tuple[int, ...]
) -> list[tuple[SampleBatch, int]]:
    return list(micro_batches(requests, size, Family(shapes or {LATENTS: SHAPE}), CPU))


def test_the_last_batch_is_padded_with_its_last_sample():
    made = batches([request(i) for i in range(6)], size=4)
    assert [count for _, count in made] == [4, 2]
    assert [[r.identity.sample for r in batch.requests] for batch, _ in made] == [[0, 1, 2, 3], [4, 5, 5, 5]]
    shapes = {(batch.initial[LATENTS].shape, batch.noise[LATENTS].shape) for batch, _ in made}
    assert shapes == {((4, *SHAPE), (4, 2, *SHAPE))}
    assert torch.equal(made[1][0].initial[LATENTS][1], made[1][0].initial[LATENTS][3])


def test_noise_is_a_function_of_the_sample():
    """Whatever the order and the batch; expected values: the draws that sampling.noise defines."""
    requests = [request(0, start=0), request(1, start=1), request(0, prompt_id="q"), request(0, step=4)]
    for order, size in (([0, 1, 2, 3], 4), ([3, 1, 0, 2], 2)):
        for batch, _ in batches([requests[i] for i in order], size):
            for row, asked in enumerate(batch.requests):
                identity = asked.identity.step, asked.identity.prompt_id, asked.identity.sample
                drawn = standard_normal(SHAPE, SEED, INITIAL_NOISE, *identity)
                assert torch.equal(batch.initial[LATENTS][row], drawn)
                for place in range(2):
                    step = asked.window.start + place
                    drawn = standard_normal(SHAPE, SEED, TRANSITION_NOISE, *identity, step)
                    assert torch.equal(batch.noise[LATENTS][row, place], drawn)


def test_shared_initial_noise_is_that_of_another_sample():
    """And the noise of transitions stays each sample's own."""
    first, second = request(0), request(1)
    ((batch, _),) = batches([first, replace(second, start=first.identity)], 2)
    assert torch.equal(batch.initial[LATENTS][0], batch.initial[LATENTS][1])
    ((own, _),) = batches([first, second], 2)
    assert torch.equal(batch.noise[LATENTS], own.noise[LATENTS])
    assert not torch.equal(own.initial[LATENTS][0], own.initial[LATENTS][1])


def test_no_two_draws_are_the_same():
    requests = [request(0), request(1), request(0, prompt_id="q"), request(0, step=4)]
    ((batch, _),) = batches(requests, 4)
    draws = torch.cat([batch.initial[LATENTS], batch.noise[LATENTS].flatten(0, 1)]).flatten(1)
    assert len(draws.unique(dim=0)) == 12  # 4 initial, 4 x 2 of transitions


def test_a_samples_hash_is_of_all_its_noise(monkeypatch):
    """Initial or of a transition, one other value shows; the place in a batch does not."""

    def hashes(*samples: int, changed: str | None = None) -> list[int]:
        def draw(shape, seed, purpose, *identity):
            return standard_normal(shape, seed, purpose, *identity) + (purpose == changed)

        monkeypatch.setattr(batching, "standard_normal", draw)
        return [
            n for batch, _ in batches([request(i) for i in samples], 2) for n in batch.noise_hash.tolist()
        ]

    first, second = hashes(0, 1)
    assert hashes(1, 0) == [second, first]
    others = [hashes(0, 1, changed=purpose)[0] for purpose in (INITIAL_NOISE, TRANSITION_NOISE)]
    assert len({first, second, *others}) == 4


def test_streams_have_noise_of_their_own():
    """Of equal shapes, too; a hash covers both."""
    ((both, _),) = batches([request(0)], 1, video=SHAPE, audio=SHAPE)
    ((one, _),) = batches([request(0)], 1, video=SHAPE)
    draws = [tensors[name].flatten() for tensors in (both.initial, both.noise) for name in ("video", "audio")]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[2], draws[3])
    assert torch.equal(one.initial["video"], both.initial["video"])
    assert int(one.noise_hash) != int(both.noise_hash)


def test_conditions_are_padded_once_for_all_samples_that_share_them():
    first, other = request(0, tokens=5), request(1, tokens=7)
    same = replace(first, identity=replace(first.identity, sample=2))
    made = [batch for batch, _ in batches([first, other, same], 2)]
    assert [c["embeds"].shape for batch in made for c in batch.conditions] == [(8, 4)] * 4
    assert made[0].conditions[0]["embeds"][:5].eq(1).all() and not made[0].conditions[0]["embeds"][5:].any()
    assert made[1].conditions[0] is made[0].conditions[0] is not made[0].conditions[1]
    assert len({id(negative) for batch in made for negative in batch.negative}) == 1
    ((unguided, _),) = batches([replace(first, negative=None)], 1)
    assert unguided.negative is None


SCHEDULE = Schedule(torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]), torch.tensor([1000.0, 800.0, 600.0, 300.0]))


def made_samples(*requests: SampleRequest):
    ((batch, _),) = batches(list(requests), len(requests))
    count, size = len(requests), requests[0].window.size
    recording = Recording(
        {LATENTS: torch.zeros(count, size + 1, *SHAPE)},
        torch.zeros(count, size),
        {LATENTS: torch.ones(count, *SHAPE)},
    )
    media = Media(torch.zeros(count, 1, 3, 4, 4, dtype=torch.uint8))
    return batch.samples(recording, media, {LATENTS: SCHEDULE}, version=5)


def test_samples_hold_the_schedule_at_their_windows():
    made = made_samples(request(0, start=0), request(1, start=2))
    trajectory = made.trajectory
    expected = torch.tensor([[1.0, 0.8, 0.6], [0.6, 0.3, 0.0]])
    torch.testing.assert_close(trajectory.sigmas[LATENTS], expected)
    expected = torch.tensor([[1000.0, 800.0], [600.0, 300.0]])
    torch.testing.assert_close(trajectory.timesteps[LATENTS], expected)
    torch.testing.assert_close(trajectory.sigma_max[LATENTS], torch.tensor([0.8, 0.8]))
    assert made.sample.tolist() == [0, 1]
    assert made.version.tolist() == [5, 5]
    assert made.clean[LATENTS].eq(1).all()


def test_without_stochastic_steps_there_is_no_trajectory():
    assert made_samples(request(0, start=0, size=0)).trajectory is None


@pytest.mark.parametrize(("size", "ranks", "wasted"), [(8, 1, None), (9, 1, 1), (8, 2, 4), (4, 2, None)])
def test_a_micro_batch_larger_than_a_replicas_samples_is_told(size, ranks, wasted):
    """8 samples in a step. Smaller ones are padded at the end at most."""
    settings = ("data.prompts_per_step=4", "data.samples_per_prompt=2", f"rollout.micro_batch_size={size}")
    config = load_config(["recipe=flowgrpo_tiny", *NO_PATHS, *settings]).config
    said = describe_padding(config, make_layout(config, 0, ranks))
    if wasted is None:
        assert said is None
    else:
        assert said.startswith(f"rollout.micro_batch_size={size} is more than the {8 // ranks} samples")
        assert said.endswith(f"each step computes {wasted} for nothing")
