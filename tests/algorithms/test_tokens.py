"""GRPO, DAPO and GSPO against loops in float64; their weights; and a small model that learns to count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from omnirl_hpc.algorithms.advantages import advantages
from omnirl_hpc.algorithms.tokens import (
    TokenPoint,
    dapo_loss,
    grpo_loss,
    gspo_loss,
    overlong_penalty,
    sequence_weights,
    token_weights,
)

LENGTHS = (4, 1, 3, 2)
LOSSES = {"grpo": (grpo_loss, sequence_weights), "dapo": (dapo_loss, token_weights)}
LOSSES["gspo"] = (lambda *given: gspo_loss(*given, 0.15, 0.2), sequence_weights)
every_loss = pytest.mark.parametrize("name", LOSSES)


def case(weigh, advantage=(1.0, -2.0, 0.5, -0.5)) -> tuple[TokenPoint, Tensor]:
    """Four sequences of unequal length, NaN where they have no token; current log-probabilities [4, 4]."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(4, 4, generator=generator)  # noqa: E731
    mask = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]
    old, current = (-draw().abs() - 0.5 for _ in range(2))
    current = old + 0.3 * (current - old)
    old, current = (torch.where(mask, values, torch.nan) for values in (old, current))
    reference = old + 0.2 * draw()
    return TokenPoint(old, mask, torch.tensor(advantage), weigh(mask), reference), current


def by_loop(name: str, point: TokenPoint, log_prob: Tensor, kl: float = 0.0) -> float:
    """Each algorithm as its paper writes it, over sequences and their tokens."""
    tokens, total, low, high = sum(LENGTHS), 0.0, 0.2, {"grpo": 0.2, "dapo": 0.28, "gspo": 0.2}[name]
    low = 0.15 if name == "gspo" else low
    clip = lambda ratio: min(max(ratio, 1 - low), 1 + high)  # noqa: E731
    for b, length in enumerate(LENGTHS):
        a = float(point.advantages[b])
        logs = [float(log_prob[b, t]) - float(point.old_log_prob[b, t]) for t in range(length)]
        if name == "gspo":
            ratio = math.exp(sum(logs) / length)
            total -= min(ratio * a, clip(ratio) * a) / len(LENGTHS)
            continue
        for t, log in enumerate(logs):
            ratio = math.exp(log)
            behind = float(point.reference_log_prob[b, t]) - float(log_prob[b, t])
            value = -min(ratio * a, clip(ratio) * a) + kl * (math.exp(behind) - behind - 1)
            total += value / tokens if name == "dapo" else value / length / len(LENGTHS)
    return total


@every_loss
def test_value_and_gradient_of_a_loop_in_float64(name):
    loss, weigh = LOSSES[name]
    point, current = case(weigh)
    current.requires_grad_()
    output = loss(point, current)
    output.loss.backward()
    plain = current.detach().double()
    assert float(output.loss.detach()) == pytest.approx(by_loop(name, point, plain), rel=1e-5)
    assert bool((current.grad[~point.mask] == 0).all())
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            step = torch.zeros(4, 4, dtype=torch.float64)
            step[b, t] = 1e-6
            ends = [by_loop(name, point, plain + s * step) for s in (1, -1)]
            slope = (ends[0] - ends[1]) / 2e-6
            assert float(current.grad[b, t]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_the_divergence_from_the_reference_is_added():
    point, current = case(sequence_weights)
    output = grpo_loss(point, current, 0.2, kl_coef=0.3)
    assert float(output.loss) == pytest.approx(by_loop("grpo", point, current, kl=0.3), rel=1e-5)
    with pytest.raises(ValueError, match="kl_coef=0.3 needs the log-probabilities of the reference"):
        grpo_loss(
            TokenPoint(point.old_log_prob, point.mask, point.advantages, point.weights), current, 0.2, 0.3
        )


@pytest.mark.parametrize(
    ("ratio", "advantage", "grpo", "dapo"),
    [
        (1.25, 1.0, -1.2, -1.25),  # between the two ranges above
        (1.5, 1.0, -1.2, -1.28),
        (0.7, 1.0, -0.7, -0.7),
        (0.7, -1.0, 0.8, 0.8),
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_clip_edges_by_hand(ratio, advantage, grpo, dapo):
    mask = torch.ones(1, 1, dtype=torch.bool)
    point = TokenPoint(torch.zeros(1, 1), mask, torch.tensor([advantage]), torch.ones(1))
    log_prob = torch.tensor([[math.log(ratio)]])
    assert float(grpo_loss(point, log_prob).loss) == pytest.approx(grpo, rel=1e-5)
    assert float(dapo_loss(point, log_prob).loss) == pytest.approx(dapo, rel=1e-5)


def test_the_ratio_of_a_sequence_by_hand():
    """Two tokens with ratios 4 and 1/1: the sequence's is 2, which 1.2 clips for a good one alone."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    for advantage, expected in ((1.0, -1.2), (-1.0, 2.0)):
        point = TokenPoint(torch.zeros(1, 2), mask, torch.tensor([advantage]), torch.ones(1))
        output = gspo_loss(point, torch.tensor([[math.log(4.0), 0.0]]), 0.1, 0.2)
        assert float(output.loss) == pytest.approx(expected, rel=1e-5)
        assert output.means["ratio/mean"].tolist() == pytest.approx([2.0], rel=1e-5)


@every_loss
def test_micro_batches_and_their_order_change_nothing(name):
    loss, weigh = LOSSES[name]
    point, current = case(weigh)

    def accumulated(parts: list[list[int]]) -> tuple[float, Tensor]:
        leaf, total = current.clone().requires_grad_(), 0.0
        for rows in parts:
            part = TokenPoint(
                *(getattr(point, key)[rows] for key in ("old_log_prob", "mask", "advantages", "weights"))
            )
            output = loss(part, leaf[rows])
            output.loss.backward()
            total += float(output.loss.detach())
        return total, leaf.grad

    whole, gradient = accumulated([[0, 1, 2, 3]])
    for parts in ([[0], [1], [2], [3]], [[3, 1], [2, 0]]):
        total, other = accumulated(parts)
        assert total == pytest.approx(whole, abs=1e-6)
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)


@every_loss
def test_a_group_of_equal_rewards_has_exactly_no_gradient(name):
    loss, weigh = LOSSES[name]
    point, current = case(
        weigh, advantages(torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)).tolist()
    )
    current.requires_grad_()
    loss(point, current).loss.backward()
    assert bool((current.grad == 0).all())


@every_loss
def test_a_sequence_of_weight_zero_counts_nothing_even_if_it_is_nan(name):
    loss, weigh = LOSSES[name]
    point, current = case(weigh)
    point.weights[1] = 0
    alone = float(loss(point, current).loss)
    point.old_log_prob[1], point.advantages[1] = torch.nan, torch.nan
    current.requires_grad_()
    output = loss(point, current)
    output.loss.backward()
    assert float(output.loss.detach()) == alone and bool((current.grad[1] == 0).all())


def test_weights_count_sequences_or_tokens_equally():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert sequence_weights(mask).tolist() == [0.5, 0.5, 0.0]
    assert token_weights(mask).tolist() == [0.75, 0.25, 0.0]


def test_overlong_shaping():
    """DAPO's equation 13 with 20 tokens at most and a buffer of 4."""
    lengths = torch.tensor([10, 16, 17, 18, 20, 25])
    assert overlong_penalty(lengths, 20, 4).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer=0 must be between 1 and longest=20"):
        overlong_penalty(lengths, 20, 0)


class Writer(nn.Module):
    """An autoregressive policy over five letters and an end, which sees the last letter and the place."""

    END = 5

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(7, 9, 6))  # [place, last letter or prompt 6…8, next]

    def log_probs(self, prompts: Tensor, written: Tensor) -> Tensor:
        """[B, T] of what was written."""
        before = torch.cat([6 + prompts[:, None], written[:, :-1]], dim=1)
        scores = self.scores[torch.arange(written.shape[1]), before].log_softmax(dim=-1)
        return scores.gather(2, written[..., None]).squeeze(2)

    @torch.no_grad()
    def write(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """[B, 7] letters, and the mask up to the first end."""
        last, letters = 6 + prompts, []
        for place in range(7):
            chances = self.scores[place, last].softmax(dim=-1)
            last = torch.multinomial(chances, 1, generator=generator).squeeze(1)
            letters.append(last)
        written = torch.stack(letters, dim=1)
        ended = (written == self.END).long().cumsum(dim=1)
        return written, (ended - (written == self.END).long()) == 0


def score(prompts: Tensor, written: Tensor, mask: Tensor) -> Tensor:
    """How many of the letters prompt, prompt + 1, prompt + 2 stand in their places; one off for each letter
    more than three and an end.
    """
    wanted = prompts[:, None] + torch.arange(3)
    right = ((written[:, :3] == wanted) & mask[:, :3]).float().sum(dim=1)
    return right / 3 + overlong_penalty(mask.sum(dim=1), longest=7, buffer=3)


@every_loss
def test_a_small_model_learns(name):
    """From what chance gives, a sixth of the letters and sequences without an end, to nearly all."""
    loss, weigh = LOSSES[name]
    model, generator = Writer(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    prompts = torch.arange(3).repeat_interleave(32)
    means = []
    for _ in range(100):
        written, mask = model.write(prompts, generator)
        rewards = score(prompts, written, mask)
        means.append(float(rewards.mean()))
        old = model.log_probs(prompts, written).detach()
        point = TokenPoint(old, mask, advantages(rewards, prompts, std="group"), weigh(mask))
        for _ in range(2):  # the second is off-policy
            optimizer.zero_grad()
            loss(point, model.log_probs(prompts, written)).loss.backward()
            optimizer.step()
    assert means[0] < 0 and means[-1] > 0.8
