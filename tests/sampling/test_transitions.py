"""transition(): published formulas, golden numbers, and what must hold for every input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.transitions import KINDS

STOCHASTIC_KINDS = tuple(kind for kind in KINDS if kind != "ode")

# (kind, sigma, sigma', eta, sigma_max), mean, std, log-prob, for x = 1, v = 0.5, x' = 0.9. Means and
# log-probs are the golden numbers of issue 2; stds are those of the table in verl_omni.md section 1.4 (column
# "noise" for sde), whose numbers were computed in double precision from the formulas read in verl-omni's
# flow_match_sde.py.
GOLDEN = [
    (("sde", 0.8, 0.6, 0.7, None), 0.6305, 0.626099, -0.543332),
    (("sde", 1.0, 0.9, 0.7, 0.9), 0.7050, 0.7, -0.601065),
    (("sde", 0.8, 0.6, 1.2, None), 0.1080, 2.4 * math.sqrt(0.2), -1.261938),
    (("cps", 0.8, 0.6, 0.8, None), 0.443951, 0.570634, -0.207980),
    (("dance", 0.8, 0.6, 1.2, None), 0.7020, 0.536656, -0.364604),
]


@pytest.mark.parametrize(("case", "mean", "std", "log_prob"), GOLDEN)
def test_golden_numbers(case, mean, std, log_prob):
    kind, sigma, sigma_next, eta, sigma_max = case
    shape = (1, 2, 3)
    got = transition(
        kind,
        torch.full(shape, 0.5),
        torch.ones(shape),
        sigma,
        sigma_next,
        noise_level=eta,
        sigma_max=sigma_max,
        next_sample=torch.full(shape, 0.9),
    )
    assert got.mean.flatten().tolist() == pytest.approx([mean] * 6, abs=1e-6)
    assert float(got.std) == pytest.approx(std, abs=1e-6)
    assert got.log_prob.tolist() == pytest.approx([log_prob], abs=1e-6)


def papers(
    kind: str, v: float, x: float, t: float, u: float, eta: float, t_max: float
) -> tuple[float, float]:
    """(mean, std) of the step t -> u, in double precision and in the notation of the papers (field.md A.1),
    written down anew.

    Flow-GRPO, a step dt < 0 of dx = [v + s^2 / (2t) (x + (1 - t) v)] dt + s dw, s = eta sqrt(t / (1 - t)).
    Flow-CPS: x' = (1 - u) x0_hat + sqrt(u^2 - std^2) eps_hat + std z.
    DanceGRPO: dx = [v - eta^2 / 2 score] dt + eta dw, score = -eps_hat / t for x = (1 - t) x0 + t eps.
    """
    dt, x0_hat, eps_hat = u - t, x - t * v, x + (1 - t) * v
    if kind == "sde":
        s = eta * math.sqrt(t / (1 - (t_max if t == 1 else t)))
        return x + (v + s * s / (2 * t) * (x + (1 - t) * v)) * dt, s * math.sqrt(-dt)
    if kind == "cps":
        std = u * math.sin(eta * math.pi / 2)
        return (1 - u) * x0_hat + math.sqrt(u * u - std * std) * eps_hat, std
    return x + (v - eta * eta / 2 * (-eps_hat / t)) * dt, eta * math.sqrt(-dt)


numbers = st.floats(-3, 3, width=32)
kinds = st.sampled_from(STOCHASTIC_KINDS)
etas = st.floats(0.0625, 1, width=32)
SIGMAS = np.linspace(0.02, 1.0, 50)


@st.composite
def steps(draw):
    """(sigma, sigma') at least 0.02 apart, as in a schedule of up to 50 steps; sigma may be 1."""
    low, high = sorted(draw(st.lists(st.integers(0, len(SIGMAS) - 1), min_size=2, max_size=2, unique=True)))
    return float(SIGMAS[high]), float(SIGMAS[low])


@given(kinds, numbers, numbers, numbers, steps(), etas)
def test_formulas_of_the_papers(kind, v, x, following, step, eta):
    mean, std = papers(kind, v, x, *step, eta, t_max=0.97)
    got = transition(
        kind,
        torch.tensor([[v]]),
        torch.tensor([[x]]),
        *step,
        noise_level=eta,
        sigma_max=0.97,
        next_sample=torch.tensor([[following]]),
    )
    assert float(got.mean) == pytest.approx(mean, rel=1e-4, abs=1e-4)
    assert float(got.std) == pytest.approx(std, rel=1e-4)
    # Gaussian density from torch.distributions; cps publishes -(x' - mean)^2 without variance or normaliser.
    gaussian = torch.distributions.Normal(float(got.mean), float(got.std)).log_prob(torch.tensor(following))
    expected = -((following - mean) ** 2) if kind == "cps" else float(gaussian)
    assert float(got.log_prob) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_ode_is_eulers_step():
    got = transition(
        "ode", torch.tensor([[0.5, -1.0]]), torch.tensor([[1.0, 2.0]]), 0.75, 0.5
    )  # x + v (0.5 - 0.75)
    assert got.mean.tolist() == got.next_sample.tolist() == [[0.875, 2.25]]
    assert float(got.std) == 0 and got.log_prob is None


@given(kinds, numbers, numbers, numbers, steps())
def test_eta_to_zero_tends_to_the_ode_step(kind, v, x, z, step):
    velocity, sample, noise = (torch.tensor([[value]]) for value in (v, x, z))
    ode = transition("ode", velocity, sample, *step).next_sample
    distances = [
        float(
            (
                transition(
                    kind, velocity, sample, *step, noise_level=eta, sigma_max=0.97, noise=noise
                ).next_sample
                - ode
            ).abs()
        )
        for eta in (1e-2, 1e-4, 1e-6)
    ]
    # The noise falls with eta, at most sqrt(1 / (1 - 0.97)) |z| eta sqrt(-dt) < 18 eta; drift terms with
    # eta^2. 1e-5: fp32.
    assert all(distance <= 20 * eta + 1e-5 for distance, eta in zip(distances, (1e-2, 1e-4, 1e-6)))


@given(kinds, numbers, numbers, steps(), etas, st.floats(0.0625, 3, width=32), st.sampled_from((-1, 1)))
def test_log_prob_is_largest_at_the_mean(kind, v, x, step, eta, distance, sign):
    arguments = (kind, torch.tensor([[v]]), torch.tensor([[x]]), *step)
    options = {"noise_level": eta, "sigma_max": 0.97}
    mean = transition(*arguments, **options, next_sample=torch.zeros(1, 1)).mean
    at_mean, near, far = (
        transition(*arguments, **options, next_sample=mean + sign * d).log_prob
        for d in (0.0, distance, 2 * distance)
    )
    assert at_mean > near > far


def batch_of(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {"velocity": draw(size, 3, 4), "sample": draw(size, 3, 4), "noise": draw(size, 3, 4)}


@settings(max_examples=30)
@given(kinds, st.integers(1, 5), st.integers(0, 2**31), st.data())
def test_a_batch_equals_singles_and_tensor_sigmas_equal_scalars(kind, size, seed, data):
    tensors = batch_of(size, seed)
    pairs = data.draw(st.lists(steps(), min_size=size, max_size=size))
    sigma, sigma_next = (torch.tensor(values) for values in zip(*pairs))
    options = {"noise_level": 0.7, "sigma_max": torch.full((size,), 0.97)}
    together = transition(
        kind, tensors["velocity"], tensors["sample"], sigma, sigma_next, noise=tensors["noise"], **options
    )
    for i, pair in enumerate(pairs):
        one = {name: tensor[i : i + 1] for name, tensor in tensors.items()}
        alone = transition(
            kind, one["velocity"], one["sample"], *pair, noise=one["noise"], noise_level=0.7, sigma_max=0.97
        )
        torch.testing.assert_close(together.mean[i : i + 1], alone.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.std[i : i + 1], alone.std, rtol=1e-6, atol=0)
        torch.testing.assert_close(together.next_sample[i : i + 1], alone.next_sample, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together.log_prob[i : i + 1], alone.log_prob, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", STOCHASTIC_KINDS)
def test_a_drawn_sample_is_scored_to_the_same_log_prob(kind):
    tensors = batch_of(4, seed=1)
    options = {"noise_level": 0.7}
    drawn = transition(
        kind, tensors["velocity"], tensors["sample"], 0.8, 0.6, noise=tensors["noise"], **options
    )
    scored = transition(
        kind, tensors["velocity"], tensors["sample"], 0.8, 0.6, next_sample=drawn.next_sample, **options
    )
    torch.testing.assert_close(drawn.next_sample, drawn.mean + drawn.std * tensors["noise"], rtol=0, atol=0)
    assert torch.equal(
        drawn.log_prob, scored.log_prob
    )  # bitwise: ratio/first_update_max_abs_log = 0 rests on it


def test_log_prob_is_the_mean_over_latent_dimensions():
    # cps: -(x' - mean)^2; x' = mean + (1, 2, 3, 4) gives -(1 + 4 + 9 + 16) / 4
    sample, velocity = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)
    offset = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    got = transition("cps", velocity, sample, 0.8, 0.6, noise_level=0.5, next_sample=offset)
    assert got.log_prob.tolist() == [-7.5]


def test_sigma_max_is_read_only_where_sigma_is_one():
    one, score = torch.ones(2, 1), torch.zeros(2, 1)
    got = transition(
        "sde",
        one,
        one,
        torch.tensor([1.0, 0.8]),
        torch.tensor([0.9, 0.6]),
        noise_level=0.7,
        sigma_max=0.5,
        next_sample=score,
    )
    # sqrt(1 / (1 - 0.5)) 0.7 sqrt(0.1) and sqrt(0.8 / 0.2) 0.7 sqrt(0.2)
    assert got.std.flatten().tolist() == pytest.approx([0.313050, 0.626099], abs=1e-6)


def test_computes_in_fp32_whatever_the_inputs():
    velocity, sample = torch.full((1, 4), 0.5, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.bfloat16)
    got = transition("sde", velocity, sample, 0.8, 0.6, noise_level=0.7, next_sample=torch.full((1, 4), 0.9))
    assert {t.dtype for t in (got.mean, got.std, got.next_sample, got.log_prob)} == {torch.float32}
    assert float(got.log_prob) == pytest.approx(
        -0.543332, abs=1e-6
    )  # golden; bf16 arithmetic is off in the third digit


def test_gradient_flows_through_the_mean_only():
    velocity = torch.full((1, 1), 0.5, requires_grad=True)
    drawn = transition("dance", velocity, torch.ones(1, 1), 0.8, 0.6, noise_level=1.2, noise=torch.ones(1, 1))
    drawn.log_prob.backward()
    # d/dv of -(x' - mean)^2 / (2 std^2) with x' fixed: (x' - mean) / std^2 dmean/dv = z / std dmean/dv = 1 /
    # 0.536656 x dmean/dv; mean = x + v dt + eta^2 (x + (1 - sigma) v) / sigma dt / 2, so dmean/dv = -0.2 (1 +
    # 1.44 x 0.2 / 0.8 / 2) = -0.236
    assert float(velocity.grad) == pytest.approx(-0.236 / 0.536656, abs=1e-5)


ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("heun", ONE, ONE, 0.8, 0.6), {}, "unknown transition 'heun'"),
        (("sde", ONE, ONE, 0.6, 0.8), {"noise_level": 0.7, "noise": ONE}, "greater than sigma_next"),
        (("ode", ONE, ONE, 0.6, 0.6), {}, "greater than sigma_next"),
        (
            ("sde", ONE, ONE, torch.tensor([math.nan]), 0.6),
            {"noise_level": 0.7, "noise": ONE},
            "greater than sigma_next",
        ),
        (("ode", ONE, ONE, 0.8, 0.6), {"noise": ONE}, "neither noise nor next_sample"),
        (("ode", ONE, ONE, 0.8, 0.6), {"next_sample": ONE}, "neither noise nor next_sample"),
        (("sde", ONE, ONE, 0.8, 0.6), {"noise_level": 0.0, "noise": ONE}, "use kind='ode'"),
        (("dance", ONE, ONE, 0.8, 0.6), {"noise_level": -0.1, "noise": ONE}, "use kind='ode'"),
        (("sde", ONE, ONE, 0.8, 0.6), {"noise_level": 0.7}, "either noise"),
        (("sde", ONE, ONE, 0.8, 0.6), {"noise_level": 0.7, "noise": ONE, "next_sample": ONE}, "either noise"),
        (("sde", ONE, ONE, 1.0, 0.9), {"noise_level": 0.7, "noise": ONE}, "give sigma_max"),
        (
            ("sde", ONE, ONE, 1.0, 0.9),
            {"noise_level": 0.7, "noise": ONE, "sigma_max": 1.0},
            "sigma_max=1.0 must be less than 1",
        ),
        (("cps", ONE, ONE, 0.8, 0.6), {"noise_level": 1.1, "noise": ONE}, "at most 1"),
        (("cps", ONE, ONE, 0.8, 0.0), {"noise_level": 0.5, "noise": ONE}, "sigma_next = 0"),
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        transition(*arguments, **options)


def test_cps_with_eta_one_renews_all_noise():
    got = transition("cps", torch.full((1, 1), 0.5), ONE, 0.8, 0.6, noise_level=1.0, next_sample=ONE)
    # std = sigma', mean = (1 - sigma') (x - sigma v) = 0.4 x 0.6
    assert float(got.std) == pytest.approx(0.6, abs=1e-6)
    assert float(got.mean) == pytest.approx(0.24, abs=1e-6)
