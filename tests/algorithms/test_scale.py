"""The size of log-ratios against ratios that are drawn, and remarks on clip ranges that are out of scale."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from omnirl_hpc.algorithms.scale import LogRatioScale, ratio_scale, remark_on_range, step_scales
from omnirl_hpc.config.schema import Config, SamplingConfig, WindowConfig
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.schedule import Schedule

SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0])
SCHEDULE = Schedule(SIGMAS, 1000 * SIGMAS[:-1])


@pytest.mark.parametrize(("kind", "noise_level"), [("sde", 0.7), ("cps", 0.8), ("dance", 0.3)])
@pytest.mark.parametrize("step", [0, 2])
def test_log_ratios_are_as_large_as_they_are_said_to_be(kind, noise_level, step):
    """2000 samples whose velocities move by random values of root mean square 0.05: the deviation of their
    log-ratios, and minus their mean where the noise that was drawn is 0.
    """
    generator, shape, change = torch.Generator().manual_seed(0), (2000, 5, 8), 0.05
    x, v, noise, way = (torch.randn(shape, generator=generator) for _ in range(4))
    sigmas, given = SIGMAS[step : step + 2].tolist(), {"noise_level": noise_level, "sigma_max": 0.8}

    def log_ratio(noise: torch.Tensor) -> torch.Tensor:
        drawn = transition(kind, v, x, *sigmas, **given, noise=noise)
        moved = transition(kind, v + change * way, x, *sigmas, **given, next_sample=drawn.next_sample)
        return (moved.log_prob - drawn.log_prob).double()

    (streams,) = step_scales(kind, noise_level, {"a": SCHEDULE}, {"a": shape[1:]}, [step])
    scale = ratio_scale(kind, streams)
    assert float(log_ratio(noise).std()) == pytest.approx(scale.linear * change, rel=0.1)
    assert float(-log_ratio(0 * noise).mean()) == pytest.approx(scale.quadratic * change**2, rel=0.02)


def test_streams_count_by_their_elements():
    """Two streams of one schedule are one of all their elements."""
    shapes = {"video": (3, 2), "audio": (2, 1)}
    schedules = dict.fromkeys(shapes, SCHEDULE)
    (parts,) = step_scales("sde", 0.7, schedules, shapes, [1])
    (whole,) = step_scales("sde", 0.7, {"all": SCHEDULE}, {"all": (8,)}, [1])
    a, b = ratio_scale("sde", parts), ratio_scale("sde", whole)
    assert (a.linear, a.quadratic) == pytest.approx((b.linear, b.quadratic))


@pytest.mark.parametrize("scale", [LogRatioScale(2.0, 0.0), LogRatioScale(0.0, 3.0), LogRatioScale(0.1, 5.0)])
@pytest.mark.parametrize("limit", [1e-6, 0.1])
def test_the_change_at_a_limit(scale, limit):
    assert scale.at(scale.change_at(limit)) == pytest.approx(limit)


def test_a_remark_names_what_would_fit():
    scales = [LogRatioScale(1e-3, 0.0), LogRatioScale(2e-3, 0.0)]  # .01 is 1e-5 to 2e-5
    assert remark_on_range("clip", 1e-5, scales, "these") is None
    tight = remark_on_range("algorithm.clip_range", 1e-7, scales, "sde")
    assert tight.startswith("algorithm.clip_range=1e-07 is out of scale for sde")
    assert "by 5e-05 to 0.0001" in tight and "rounding alone clips" in tight
    assert tight.endswith("it is 1e-05 to 2e-05")
    assert "no sample will ever be out of range" in remark_on_range("clip", 1.0, scales, "these")


@pytest.mark.parametrize(("clip", "said"), [(1e-5, 0), (0.2, 1), (1e-8, 1)])
def test_an_algorithm_remarks_on_its_clip_range(clip, said):
    """A range of PPO for tokens is out of scale for 65536 latent values; the published one is not."""
    sampling = SamplingConfig(num_inference_steps=4, noise_level=1.2, window=WindowConfig(last=3))
    algorithm = FlowGRPO(Config(sampling=sampling, algorithm=FlowGRPOConfig(clip_range=clip)))
    remarks = list(algorithm.remarks({"latents": SCHEDULE}, {"latents": (1024, 64)}))
    assert len(remarks) == said
    assert all("sampling.transition=sde, noise level 1.2, and 65536 latent" in text for text in remarks)
