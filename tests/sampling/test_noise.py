"""Draws are functions of their identity alone."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.sampling import noise as noise_module
from omnirl_hpc.sampling.noise import INITIAL_NOISE, TRANSITION_NOISE, standard_normal, uniform_integer


def test_same_identity_same_noise_whatever_was_drawn_before():
    first = standard_normal((2, 3), 0, INITIAL_NOISE, "a", 1)
    torch.randn(100)
    standard_normal((5,), 1, INITIAL_NOISE)
    assert torch.equal(standard_normal((2, 3), 0, INITIAL_NOISE, "a", 1), first)
    assert first.dtype == torch.float32 and first.device.type == "cpu"


def test_drawing_leaves_the_global_stream_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    standard_normal((7,), 0, INITIAL_NOISE)
    assert torch.equal(torch.randn(3), expected)


def test_every_part_of_an_identity_counts():
    identities = [
        (0, INITIAL_NOISE, "a", 1),
        (1, INITIAL_NOISE, "a", 1),
        (0, TRANSITION_NOISE, "a", 1),
        (0, INITIAL_NOISE, "b", 1),
        (0, INITIAL_NOISE, "a", 2),
        (0, INITIAL_NOISE, "a", "1"),
        (0, INITIAL_NOISE, "a1"),
        (0, INITIAL_NOISE, "a", 1, 0),
    ]
    drawn = {tuple(standard_normal((4,), *identity).tolist()) for identity in identities}
    assert len(drawn) == len(identities)


def test_draws_are_pinned():
    """By numpy's Philox, keyed with the number that test_hashing.py pins. Others would change every run."""
    pinned = [0.27464279532432556, -0.5179939270019531, 0.09895572066307068, -0.010072913952171803]
    assert standard_normal((2, 2), 0, "noise", 1).flatten().tolist() == pinned


def test_every_bit_of_a_hash_counts(monkeypatch):
    """Cut to 32 bits, two of the million draws of a run would be equal."""
    monkeypatch.setattr(noise_module, "stable_hash", lambda number: number)
    drawn = {
        tuple(standard_normal((4,), number).tolist()) for number in (0, *(1 << bit for bit in range(63)))
    }
    assert len(drawn) == 64


def test_noise_is_standard_normal():
    # 10^5 draws: the mean is off by 1 / sqrt(10^5) = 0.0032 and the variance by sqrt(2 / 10^5) = 0.0045; 5
    # times that is allowed
    noise = torch.cat([standard_normal((1000,), 0, INITIAL_NOISE, i) for i in range(100)])
    assert abs(float(noise.mean())) < 0.016
    assert abs(float(noise.var()) - 1) < 0.023


def test_uniform_integer_covers_its_range_and_refuses_an_empty_one():
    assert {uniform_integer(3, 6, i) for i in range(100)} == {3, 4, 5}
    with pytest.raises(ValueError, match=r"no integer in \[3, 3\)"):
        uniform_integer(3, 3, 0)
