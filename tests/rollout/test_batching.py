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
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.windows import Window
from tests.helpers import CPU

SHAPE = (6, 16)
SEED = 11


def request(
    sample: int, prompt_id: str = "p", step: int = 3, start: int = 1, tokens: int = 5
) -> SampleRequest:
    text, negative = torch.full((tokens, 4), 1.0 + sample), torch.full((1, 4), -1.0)
    return SampleRequest(SEED, step, 0, prompt_id, sample, Window(start, 2), text, negative, text_length=8)


def batches(requests: list[SampleRequest], size: int) -> list[tuple[SampleBatch, int]]:
    return list(micro_batches(requests, size, SHAPE, CPU))


def test_the_last_batch_is_padded_with_its_last_sample():
    made = batches([request(i) for i in range(6)], size=4)
    assert [count for _, count in made] == [4, 2]
    assert [[r.sample for r in batch.requests] for batch, _ in made] == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert {(batch.initial.shape, batch.noise.shape) for batch, _ in made} == {((4, *SHAPE), (4, 2, *SHAPE))}
    assert torch.equal(made[1][0].initial[1], made[1][0].initial[3])


def test_noise_is_a_function_of_the_sample():
    """Whatever the order and the batch; expected values: the draws that sampling.noise defines."""
    requests = [request(0, start=0), request(1, start=1), request(0, prompt_id="q"), request(0, step=4)]
    expected = {(r.step, r.prompt_id, r.sample): r for r in requests}
    for order, size in (([0, 1, 2, 3], 4), ([3, 1, 0, 2], 2)):
        for batch, _ in batches([requests[i] for i in order], size):
            for row, asked in enumerate(batch.requests):
                identity = asked.step, asked.prompt_id, asked.sample
                start = expected[identity].window.start
                assert torch.equal(batch.initial[row], standard_normal(SHAPE, SEED, INITIAL_NOISE, *identity))
                for place in range(2):
                    drawn = standard_normal(SHAPE, SEED, TRANSITION_NOISE, *identity, start + place)
                    assert torch.equal(batch.noise[row, place], drawn)


def test_no_two_draws_are_the_same():
    requests = [request(0), request(1), request(0, prompt_id="q"), request(0, step=4)]
    ((batch, _),) = batches(requests, 4)
    draws = torch.cat([batch.initial, batch.noise.flatten(0, 1)]).flatten(1)
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


def test_text_is_padded_to_the_width_of_the_step():
    ((batch, _),) = batches([request(0, tokens=5), request(1, tokens=7)], 2)
    assert batch.text.embeds.shape == (2, 8, 4)
    assert batch.text.mask.sum(dim=1).tolist() == [5, 7]
    assert batch.text.embeds[0, :5].eq(1).all() and not batch.text.embeds[0, 5:].any()
    assert batch.negative.mask.sum(dim=1).tolist() == [1, 1]
    ((unguided, _),) = batches([replace(request(0), negative=None)], 1)
    assert unguided.negative is None


def test_text_is_never_truncated():
    with pytest.raises(ValueError, match="9 tokens do not fit into 8"):
        batches([request(0, tokens=9)], 1)


def test_trajectories_hold_the_schedule_at_their_windows():
    ((batch, _),) = batches([request(0, start=0), request(1, start=2)], 2)
    schedule = Schedule(torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0]), torch.tensor([1000.0, 800.0, 600.0, 300.0]))
    recording = Recording(torch.zeros(2, 3, *SHAPE), torch.zeros(2, 2), torch.zeros(2, *SHAPE))
    made = batch.trajectories(recording, torch.zeros(2, 3, 4, 4, dtype=torch.uint8), schedule, version=5)
    torch.testing.assert_close(made.sigmas, torch.tensor([[1.0, 0.8, 0.6], [0.6, 0.3, 0.0]]))
    torch.testing.assert_close(made.timesteps, torch.tensor([[1000.0, 800.0], [600.0, 300.0]]))
    torch.testing.assert_close(made.sigma_max, torch.tensor([0.8, 0.8]))
    assert made.sample.tolist() == [0, 1]
    assert made.version.tolist() == [5, 5]


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
