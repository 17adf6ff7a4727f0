"""DiffusionOPD (arXiv 2605.15055): distilling a teacher on the student's own trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from omegaconf import MISSING
from torch import Tensor

from omnirl_hpc.algorithms.algorithm import LossOutput, weighted_sum
from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.algorithms.trajectory import TransitionPoint, divergence_per_element, step_means
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import require
from omnirl_hpc.policies import CURRENT, TEACHER
from omnirl_hpc.sampling.schedule import Schedule
from omnirl_hpc.sampling.streams import Streams, map_streams


@dataclass
class DiffusionOPDConfig(FlowGRPOConfig):
    """The settings of Flow-GRPO are those of the policy loss that may be added."""

    name: str = "diffusion_opd"
    # an adapter of the same rank (PEFT's folder or one file), or another checkpoint of the family (a folder
    # in diffusers' layout, which takes as much memory again)
    teacher: str = MISSING
    teacher_coef: float = 1.0  # of the divergence from the teacher
    policy_coef: float = 0.0  # of Flow-GRPO's loss beside it; 0: distillation alone, whatever the rewards are

    def __post_init__(self) -> None:
        require(self.teacher_coef > 0, f"algorithm.teacher_coef={self.teacher_coef} must be greater than 0")
        require(self.policy_coef >= 0, f"algorithm.policy_coef={self.policy_coef} must not be negative")
        super().__post_init__()


class DiffusionOPD(FlowGRPO):
    """loss = teacher_coef mean (mu - mu_teacher)^2 / (2 std^2) + policy_coef (Flow-GRPO's loss)

    over the stochastic steps of samples that the student made: the exact KL divergence of its transition from
    the teacher's, per latent dimension. verl-omni leaves the step size out of an sde's variance, which is
    kl_scale=code.
    """

    Settings = DiffusionOPDConfig
    settings: DiffusionOPDConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policies = (*self.policies, TEACHER)

    @property
    def given(self) -> Mapping[str, str]:
        return {TEACHER: self.settings.teacher}

    def remarks(
        self, schedules: Mapping[str, Schedule], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[str]:
        return super().remarks(schedules, shapes) if self.settings.policy_coef else iter(())

    def loss(self, point: TransitionPoint, velocities: Mapping[str, Streams]) -> LossOutput:
        # Flow-GRPO's loss is proportional to advantages.
        scaled = replace(point, advantages=self.settings.policy_coef * point.advantages)
        output = super().loss(scaled, velocities)
        means = map_streams(Tensor.detach, step_means(self.transitions(point, velocities[TEACHER])))
        current = self.transitions(point, velocities[CURRENT])
        divergence = divergence_per_element(point, current, means, self.leaves_out_dt)
        loss = output.loss + self.settings.teacher_coef * weighted_sum(divergence, point.weights)
        return replace(output, loss=loss, means=output.means | {"kl_teacher": divergence.detach()})
