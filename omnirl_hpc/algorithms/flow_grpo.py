"""Flow-GRPO (arXiv 2505.05470): GRPO on the stochastic denoising steps of a flow-matching model."""

from __future__ import annotations

import torch
from torch import Tensor

from omnirl_hpc.algorithms.advantages import advantages
from omnirl_hpc.algorithms.algorithm import Algorithm, LossOutput, TrainingPoint, weighted_sum
from omnirl_hpc.config.schema import Config, FlowGRPOConfig
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.samples import Samples, stack_conditions
from omnirl_hpc.sampling.streams import Streams, map_streams, mean_over_streams
from omnirl_hpc.sampling.transitions import Transition, transition


class FlowGRPO(Algorithm):
    """PPO clipping of rho = exp(log p - log p_old), and optionally a KL divergence to the reference:

    loss = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta mean (mu - mu_ref)^2 / (2 std^2)

    where std is that of the whole transition, step size included (in the paper's notation sigma_t sqrt(dt)),
    so the second term is the exact KL divergence of two Gaussians per latent dimension.
    """

    Settings = FlowGRPOConfig
    settings: FlowGRPOConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policies = (CURRENT, REFERENCE) if self.settings.kl_coef > 0 else (CURRENT,)
        self.recomputes_old_log_prob = self.settings.old_log_prob == "recompute"
        if not self.recomputes_old_log_prob:
            self.tolerated_gap = self.settings.clip_range

    def advantages(self, rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        clip = self.settings.advantage_clip
        return advantages(rewards, groups, std=self.settings.advantage_std, mask=mask).clamp(-clip, clip)

    def training_points(self, batch: Samples, advantages: Tensor, weights: Tensor) -> list[TrainingPoint]:
        made = batch.trajectory
        steps = made.log_probs.shape[1]
        conditions = stack_conditions(batch.conditions)
        negative = None if batch.negative is None else stack_conditions(batch.negative)

        def at(streams: Streams, place: int) -> Streams:
            return map_streams(lambda tensor: tensor[:, place], streams)

        return [
            TrainingPoint(
                latents=at(made.latents, i),
                timesteps=at(made.timesteps, i),
                conditions=conditions,
                negative=negative,
                advantages=advantages,
                weights=weights / steps,
                extras={
                    "next_latents": at(made.latents, i + 1),
                    "sigma": at(made.sigmas, i),
                    "sigma_next": at(made.sigmas, i + 1),
                    "sigma_max": made.sigma_max,
                    "rollout_log_prob": made.log_probs[:, i],
                    "old_log_prob": made.log_probs[:, i],  # overwritten where it is recomputed
                },
            )
            for i in range(steps)
        ]

    def before_first_update(self, point: TrainingPoint, velocity: Streams) -> Tensor:
        log_prob = self.log_prob(point, velocity)
        if self.recomputes_old_log_prob:
            point.extras["old_log_prob"] = log_prob
        return (log_prob - point.extras["rollout_log_prob"]).abs()

    def log_prob(self, point: TrainingPoint, velocity: Streams) -> Tensor:
        """[B] log-probability of the point's transition under a model that predicts `velocity`."""
        return self._log_prob(point, self._transitions(point, velocity))

    def loss(self, point: TrainingPoint, velocities: dict[str, Streams]) -> LossOutput:
        current = self._transitions(point, velocities[CURRENT])
        log_ratio = self._log_prob(point, current) - point.extras["old_log_prob"]
        # A sample of weight 0 is replaced before exp: a NaN times a zero gradient would still be a NaN
        # gradient.
        log_ratio = torch.where(point.weights > 0, log_ratio, 0.0)
        ratio = torch.exp(log_ratio)
        clip = self.settings.clip_range
        clipped = ratio.clamp(1 - clip, 1 + clip)
        loss = weighted_sum(
            torch.maximum(-point.advantages * ratio, -point.advantages * clipped), point.weights
        )
        means = {
            "ratio/mean": ratio,
            "clip_fraction": ((ratio - 1).abs() > clip).float(),
            # of the old policy from the current one, the low-variance estimator rho - 1 - log rho (Schulman
            # 2020)
            "kl": ratio - 1 - log_ratio,
        }
        if REFERENCE in velocities:
            reference = self._transitions(point, velocities[REFERENCE])
            divergences = {
                name: gaussian_kl(step.mean, reference[name].mean.detach(), step.std)
                for name, step in current.items()
            }
            divergence = mean_over_streams(divergences, point.latents)
            loss = loss + self.settings.kl_coef * weighted_sum(divergence, point.weights)
            means["kl_reference"] = divergence
        maxima = {"ratio/max_abs_log": log_ratio.abs().max()}
        return LossOutput(
            loss, {k: v.detach() for k, v in means.items()}, {k: v.detach() for k, v in maxima.items()}
        )

    def _log_prob(self, point: TrainingPoint, steps: dict[str, Transition]) -> Tensor:
        return mean_over_streams({name: step.log_prob for name, step in steps.items()}, point.latents)

    def _transitions(self, point: TrainingPoint, velocity: Streams) -> dict[str, Transition]:
        """Of each stream."""
        extras = point.extras
        return {
            name: transition(
                self.config.sampling.transition,
                velocity[name],
                latents,
                extras["sigma"][name],
                extras["sigma_next"][name],
                noise_level=self.config.sampling.noise_level,
                sigma_max=extras["sigma_max"][name],
                next_sample=extras["next_latents"][name],
            )
            for name, latents in point.latents.items()
        }


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """[B] KL divergence of N(mean, std^2) and N(other_mean, std^2), the mean over latent dimensions."""
    return ((mean - other_mean) ** 2 / (2 * std**2)).flatten(1).mean(dim=1)
