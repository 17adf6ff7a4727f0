"""One denoising step x -> x' of a flow-matching model, as a Gaussian with a known log-probability.

Notation: x_sigma = (1 - sigma) x0 + sigma eps, velocity v = eps - x0, dt = sigma' - sigma < 0, eta = noise
level. Everything is computed in fp32. The log-probability is the mean over latent dimensions, as in the
published recipes: their clip ranges (1e-4 … 1e-6) only make sense for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("ode", "sde", "cps", "dance")


@dataclass(frozen=True)
class Transition:
    """x' given x. `mean` and `next_sample` have x's shape, `std` broadcasts against it, `log_prob` is [B]."""

    mean: Tensor
    std: Tensor  # of next_sample given sample, the step size included; 0 for ode
    next_sample: Tensor
    log_prob: Tensor | None  # None for ode, which has no density


def transition(
    kind: str,
    velocity: Tensor,
    sample: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    noise_level: float = 0.0,
    sigma_max: Tensor | float | None = None,
    noise: Tensor | None = None,
    next_sample: Tensor | None = None,
) -> Transition:
    """One step from `sample` at noise `sigma` to `sigma_next`.

    kind:
      ode    x' = x + v dt. No density: log_prob is None.
      sde    Flow-GRPO (arXiv 2505.05470): s = eta sqrt(sigma / (1 - sigma)),
             mean = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt, std = s sqrt(-dt).
             At sigma = 1 the denominator takes `sigma_max` (the schedule's second sigma) in place of sigma.
      cps    Flow-CPS (arXiv 2509.05952): std = sigma' sin(eta pi / 2), 0 < eta <= 1,
             mean = (1 - sigma') (x - sigma v) + sqrt(sigma'^2 - std^2) (x + (1 - sigma) v). Its
             log-probability is -(x' - mean)^2, without variance and without normaliser, as published: its
             scale is not that of the other kinds, and neither are its clip ranges.
      dance  DanceGRPO (arXiv 2505.07818): mean = x + v dt - eta^2 score dt / 2,
             score = -(x - (1 - sigma) x0) / sigma^2 with x0 = x - sigma v, std = eta sqrt(-dt).

    velocity, sample: [B, …]; sigma, sigma_next, sigma_max: floats or tensors of shape [B].
    Give exactly one of `noise` (standard normal, draws x') and `next_sample` (scores it); neither for ode.

    Raises ValueError: unknown kind, noise_level <= 0 for a stochastic kind (use kind="ode" for a step without
    noise), sigma not above sigma_next, sde at sigma = 1 without a sigma_max < 1, cps with eta above 1 or
    sigma_next = 0.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown transition {kind!r}; known: {', '.join(KINDS)}")
    velocity, sample = velocity.float(), sample.float()
    sigma, sigma_next = _per_sample(sigma, sample), _per_sample(sigma_next, sample)
    dt = sigma_next - sigma
    if not bool((dt < 0).all()):
        raise ValueError("sigma must be greater than sigma_next: denoising goes towards sigma = 0")

    if kind == "ode":
        if noise is not None or next_sample is not None:
            raise ValueError("an ode step takes neither noise nor next_sample")
        mean = sample + velocity * dt
        return Transition(mean, torch.zeros_like(dt), mean, None)

    if noise_level <= 0:
        raise ValueError(
            f"noise_level={noise_level}: a stochastic step needs noise; use kind='ode' for a step without"
        )
    if (noise is None) == (next_sample is None):
        raise ValueError("give either noise (to draw the next sample) or next_sample (to score it)")

    mean, std = _MOMENTS[kind](velocity, sample, sigma, sigma_next, dt, noise_level, sigma_max)
    if next_sample is None:
        assert noise is not None  # one of the two is given
        next_sample = mean + std * noise.float()
    else:
        next_sample = next_sample.float()
    # The next sample is data: no gradient flows through it, also when it was drawn from this very mean.
    error = (next_sample.detach() - mean) ** 2
    if kind == "cps":
        log_density = -error
    else:
        log_density = -error / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return Transition(mean, std, next_sample, log_density.flatten(1).mean(dim=1))


def second_order(
    clean: Tensor, clean_before: Tensor, sigma_before: Tensor, sigma: Tensor, sigma_next: Tensor
) -> Tensor | float:
    """What DPM-Solver++ of second order (2M, arXiv 2211.01095) adds to an Euler step from sigma to
    sigma_next, given the estimates x0 = x - sigma v at sigma and, one step before, at sigma_before; all
    sigmas scalars.

    With lambda = log((1 - sigma) / sigma), h and h_before the steps in it: -(1 - sigma_next) (e^-h - 1)
    (x0 - x0_before) h / (2 h_before). Nothing for the last step, as in diffusers, and after a step from
    sigma = 1, where h_before is infinite.
    """
    before, now, after = float(sigma_before), float(sigma), float(sigma_next)
    if after == 0 or before == 1:
        return 0.0
    of_before, of_now, of_after = (math.log((1 - s) / s) for s in (before, now, after))
    h, h_before = of_after - of_now, of_now - of_before
    return -(1 - after) * math.expm1(-h) * h / (2 * h_before) * (clean - clean_before)


def transition_std(
    kind: str,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: float,
    sigma_max: Tensor | float,
) -> Tensor:
    """[B] standard deviation of the stochastic step from sigma [B] to sigma_next [B], as `transition` has
    it.
    """
    nothing = torch.zeros(len(sigma), 1, device=sigma.device)
    made = transition(
        kind, nothing, nothing, sigma, sigma_next, noise_level=noise_level, sigma_max=sigma_max, noise=nothing
    )
    return made.std.flatten()


def _per_sample(value: Tensor | float, like: Tensor) -> Tensor:
    """A scalar or [B] tensor as fp32, shaped to broadcast against `like` [B, …]."""
    value = torch.as_tensor(value, dtype=torch.float32, device=like.device)
    return value.expand(like.shape[0]).reshape(-1, *[1] * (like.dim() - 1))


def _sde(velocity, sample, sigma, sigma_next, dt, noise_level, sigma_max):
    at_one = sigma >= 1
    if bool(at_one.any()):
        if sigma_max is None:
            raise ValueError(
                "sde at sigma = 1 divides by 1 - sigma: give sigma_max, the schedule's second sigma"
            )
        bounded = torch.where(at_one, _per_sample(sigma_max, sample), sigma)
        if not bool((bounded < 1).all()):
            raise ValueError(
                f"sigma_max={sigma_max} must be less than 1: sde divides by 1 - sigma_max at sigma = 1"
            )
    else:
        bounded = sigma
    s = torch.sqrt(sigma / (1 - bounded)) * noise_level
    mean = sample * (1 + s**2 / (2 * sigma) * dt) + velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * torch.sqrt(-dt)


def _cps(velocity, sample, sigma, sigma_next, dt, noise_level, sigma_max):
    if noise_level > 1:
        raise ValueError(f"cps with noise_level={noise_level}: it must be at most 1, where all noise is new")
    if not bool((sigma_next > 0).all()):
        raise ValueError("cps with sigma_next = 0 has no noise: take the last step as kind='ode'")
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = sample - sigma * velocity
    noise = sample + (1 - sigma) * velocity
    return clean * (1 - sigma_next) + noise * torch.sqrt(sigma_next**2 - std**2), std


def _dance(velocity, sample, sigma, sigma_next, dt, noise_level, sigma_max):
    clean = sample - sigma * velocity
    score = -(sample - (1 - sigma) * clean) / sigma**2
    mean = sample + velocity * dt - 0.5 * noise_level**2 * score * dt
    return mean, noise_level * torch.sqrt(-dt)


_MOMENTS = {"sde": _sde, "cps": _cps, "dance": _dance}
