"""Deliberate faults in formulas and bookkeeping, each with the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, init=False)
class Fault:
    """`new` in place of `old`, which `file` holds exactly once."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __init__(self, file: str, old: str, new: str, *tests: str) -> None:
        for name, value in (("file", file), ("old", old), ("new", new), ("tests", tests)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        short = lambda text: " ".join(text.split()) or "nothing"  # noqa: E731
        return f"{self.file}: {short(self.old)} -> {short(self.new)}"

    def problem(self, root: Path) -> str | None:
        """Why it cannot be put in, or None."""
        file = root / self.file
        times = file.read_text().count(self.old) if file.is_file() else 0
        if times != 1:
            return (
                f"{self.file} holds {self.old!r} {times} times instead of once: see tests/mutations/faults.py"
            )
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).is_file()]
        return f"{self}: there is no {', '.join(missing)}" if missing else None


FAULTS = (
    # sampling
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "velocity * (1 + s**2 * (1 - sigma) / (2 * sigma))",
        "velocity * (1 + s**2 * (1 - bounded) / (2 * sigma))",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "return mean, s * torch.sqrt(-dt)",
        "return mean, s",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        " - torch.log(std) - 0.5",
        " - 0.5",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "log_density.flatten(1).mean(dim=1)",
        "log_density.flatten(1).sum(dim=1)",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "(next_sample.detach() - mean)",
        "(next_sample - mean)",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "math.sin(noise_level * math.pi / 2)",
        "math.sin(noise_level)",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "0.5 * noise_level**2 * score",
        "noise_level**2 * score",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "torch.where(at_one, _per_sample(sigma_max, sample), sigma)",
        "_per_sample(sigma_max, sample)",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/transitions.py",
        "if noise_level <= 0:",
        "if noise_level < 0:",
        "tests/sampling/test_transitions.py",
    ),
    Fault(
        "omnirl_hpc/sampling/schedule.py",
        "float(self.sigmas[1])",
        "float(self.sigmas[0])",
        "tests/sampling/test_schedule.py",
    ),
    Fault(
        "omnirl_hpc/sampling/schedule.py",
        "np.linspace(1.0, 1 / num_steps, num_steps)",
        "np.linspace(1.0, 0.0, num_steps)",
        "tests/sampling/test_schedule.py",
    ),
    Fault(
        "omnirl_hpc/sampling/schedule.py",
        "scheduler_config.get(key, default)",
        "default",
        "tests/sampling/test_schedule.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "(places >= 0) & (places < self._size)",
        "(places >= 0) & (places <= self._size)",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "self.edges[rows, places + 1] = drawn.next_sample",
        "self.edges[rows, places + 1] = drawn.mean",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "noise=self._noise[rows, places]",
        "noise=self._noise[rows, 0 * places]",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "self.latents[rows],\n            sigma,",
        "self.latents[: len(rows)],\n            sigma,",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "        self.edges[rows, places] = self.latents[rows]\n",
        "",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/recorder.py",
        "tracks, self._tracks = self._tracks, {}",
        "tracks = self._tracks",
        "tests/sampling/test_recorder.py",
    ),
    Fault(
        "omnirl_hpc/sampling/windows.py",
        "_last(sampling) - size + 1, seed",
        "_last(sampling) - size, seed",
        "tests/sampling/test_windows.py",
    ),
    Fault(
        "omnirl_hpc/sampling/windows.py",
        '"prompt": (step, prompt_id)',
        '"prompt": (prompt_id,)',
        "tests/sampling/test_windows.py",
    ),
    Fault(
        "omnirl_hpc/sampling/windows.py",
        "sampling.num_inference_steps - 1 if",
        "sampling.num_inference_steps if",
        "tests/sampling/test_windows.py",
    ),
    Fault(
        "omnirl_hpc/sampling/windows.py",
        "_last(sampling) - window.first if window.size is None",
        "_last(sampling) if window.size is None",
        "tests/sampling/test_windows.py",
    ),
    Fault(
        "omnirl_hpc/sampling/noise.py",
        "Philox(key=stable_hash(*identity)))\n    return torch.from_numpy",
        "Philox(key=stable_hash(*identity) % 2**32))\n    return torch.from_numpy",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "omnirl_hpc/sampling/noise.py",
        "np.random.Philox(key=stable_hash(*identity)))\n    return torch.from_numpy",
        "np.random.PCG64(stable_hash(*identity)))\n    return torch.from_numpy",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "omnirl_hpc/sampling/noise.py",
        "np.random.Philox(key=stable_hash(*identity)))\n    return torch.from_numpy",
        "np.random.Philox(stable_hash(*identity)))\n    return torch.from_numpy",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "omnirl_hpc/sampling/noise.py", "% (high - low)", "% (high - low - 1)", "tests/sampling/test_noise.py"
    ),
    Fault(
        "omnirl_hpc/sampling/noise.py",
        'TRANSITION_NOISE = "transition_noise"',
        'TRANSITION_NOISE = "initial_noise"',
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "omnirl_hpc/models/qwen_image/family.py",
        "torch.arange(width, device=embeds.device) < tokens",
        "torch.arange(width, device=embeds.device) <= tokens",
        "tests/models/qwen_image/test_family.py",
    ),
    # rollout
    Fault(
        "omnirl_hpc/rollout/batching.py",
        "TRANSITION_NOISE, step) for step",
        "TRANSITION_NOISE, step - request.window.start) for step",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/rollout/batching.py",
        "schedule.timesteps[edges[:, :-1]]",
        "schedule.timesteps[edges[:, 1:] % schedule.num_steps]",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/rollout/batching.py",
        "3 * tensor_checksum(s)",
        "0 * tensor_checksum(s)",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/rollout/batching.py",
        "(known + tensor_checksum(i) + 3",
        "(known + 0 * tensor_checksum(i) + 3",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/rollout/batching.py",
        "batch += [batch[-1]]",
        "batch += [batch[0]]",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/sampling/samples.py",
        "purpose, self.step, self.prompt_id",
        "purpose, self.prompt_id",
        "tests/rollout/test_batching.py",
    ),
    Fault(
        "omnirl_hpc/rollout/diffusers_engine.py",
        "self._version)[:count]",
        "self._version)",
        "tests/rollout/test_diffusers_engine.py",
    ),
    Fault(
        "omnirl_hpc/rollout/diffusers_engine.py",
        "        self._version = version\n        return Receipt(",
        "        return Receipt(",
        "tests/rollout/test_diffusers_engine.py",
    ),
    Fault(
        "omnirl_hpc/rollout/diffusers_engine.py",
        "self._pinned.add(slots, frozen=False)",
        "self._pinned.add(slots, frozen=True)",
        "tests/rollout/test_diffusers_engine.py",
    ),
    Fault(
        "omnirl_hpc/models/family.py",
        "if width > longest",
        "if width >= longest",
        "tests/rollout/test_requests.py",
    ),
    Fault(
        "omnirl_hpc/rollout/conditions.py",
        "            self._known.move_to_end(key)",
        "            pass",
        "tests/rollout/test_conditions.py",
    ),
    Fault(
        "omnirl_hpc/rollout/requests.py",
        "    guided = config.sampling.true_cfg_scale > 1\n",
        "    guided = config.sampling.true_cfg_scale >= 1\n",
        "tests/rollout/test_requests.py",
    ),
    Fault(
        "omnirl_hpc/rollout/requests.py",
        "return group.prompt.negative_prompt or config.data.negative_prompt",
        "return config.data.negative_prompt",
        "tests/rollout/test_requests.py",
    ),
    Fault("omnirl_hpc/rollout/requests.py", "[: 1 + guided]", "[:1]", "tests/rollout/test_requests.py"),
    Fault(
        "omnirl_hpc/rollout/requests.py",
        "width = condition_width(config, family, groups)",
        "width = condition_width(config, family, [groups[i] for i in layout.groups(len(groups))])",
        "tests/rollout/test_requests.py",
    ),
    Fault(
        "omnirl_hpc/rollout/requests.py",
        "range(group.first_sample, group.first_sample + config.data.samples_per_prompt)",
        "range(config.data.samples_per_prompt)",
        "tests/rollout/test_requests.py",
    ),
    Fault(
        "omnirl_hpc/sources/generation.py",
        "batch = batch[first::k]",
        "batch = batch[first % 1 :: k]",
        "tests/sources/test_generation.py",
    ),
    Fault(
        "omnirl_hpc/sources/generation.py",
        "(self._layout.rank_in_replica - made) % k",
        "self._layout.rank_in_replica % k",
        "tests/sources/test_generation.py",
    ),
    Fault(
        "omnirl_hpc/rollout/fitting.py",
        "op=dist.ReduceOp.MIN",
        "op=dist.ReduceOp.MAX",
        "tests/rollout/test_fitting.py",
    ),
    Fault(
        "omnirl_hpc/rollout/vllm_omni/lora.py",
        "                layer.reset_lora(0)",
        "                continue",
        "tests/rollout/vllm_omni/test_engine.py",
    ),
    Fault(
        "omnirl_hpc/rollout/vllm_omni/lora.py",
        "state[module + B] * self._scale for",
        "state[module + B] for",
        "tests/rollout/vllm_omni/test_engine.py",
    ),
    # algorithms
    Fault(
        "omnirl_hpc/algorithms/advantages.py",
        "values[valid].std() + EPSILON",
        "values.std() + EPSILON",
        "tests/algorithms/test_advantages.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/advantages.py",
        "inside.std() + EPSILON",
        "inside.std(unbiased=False) + EPSILON",
        "tests/algorithms/test_advantages.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/advantages.py",
        "EPSILON = 1e-4",
        "EPSILON = 1e-8",
        "tests/algorithms/test_advantages.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/advantages.py",
        "members = (group_ids == group) & valid",
        "members = group_ids == group",
        "tests/algorithms/test_advantages.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/advantages.py",
        "inside.numel() == 0 or bool(",
        "inside.numel() > 0 and bool(",
        "tests/algorithms/test_advantages.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/surrogate.py",
        "torch.maximum(",
        "torch.minimum(",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "weights=batch.weights / steps",
        "weights=batch.weights",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/surrogate.py",
        "ratio.clamp(1 - clip_low, 1 + clip_high)",
        "ratio.clamp(1 - clip_low, 1 + 2 * clip_high)",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "mask=mask).clamp(-clip, clip)",
        "mask=mask)",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/surrogate.py",
        "torch.where(valid, log_ratio, 0.0)",
        "log_ratio",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "self.settings.kl_coef * weighted_sum",
        "weighted_sum",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/flow_grpo.py",
        "log_ratio.abs().max()",
        "log_ratio.max()",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/flow_grpo.py",
        "self.tolerated_gap = self.settings.clip_range",
        "self.tolerated_gap = 1.0",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "sigma_max=made.sigma_max",
        "sigma_max=_at(made.sigmas, 0)",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "\n                old_log_prob=made.log_probs[:, i]",
        "\n                old_log_prob=made.log_probs[:, 0]",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "(2 * std**2)",
        "(2 * std)",
        "tests/algorithms/test_flow_grpo.py",
    ),
    Fault(
        "omnirl_hpc/algorithms/trajectory.py",
        "std=self.settings.advantage_std",
        "std=None",
        "tests/algorithms/test_flow_grpo.py",
    ),
    # the step
    Fault(
        "omnirl_hpc/trainer.py",
        "enumerate(points[1:], start=1)",
        "enumerate(points[2:], start=2)",
        "tests/test_trainer.py::test_every_updates_old_log_probs_are_the_actors",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "scored.rewards[scored.own][:count]",
        "scored.rewards[:count]",
        "tests/test_trainer.py::test_two_ranks_are_one",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "        self._sampler.cursor = cursor\n",
        "",
        "tests/test_trainer.py::test_fitting_the_micro_batch_uses_up_no_prompt",
    ),
    Fault(
        "omnirl_hpc/trainer.py",
        "for blend in self.algorithm.after_step(step):",
        "for blend in ():",
        "tests/test_trainer.py::test_an_algorithm_is_told_of_the_end_of_every_step",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "scored.weights(self._config.actor.updates_per_step)",
        "scored.weights(1)",
        "tests/test_trainer.py::test_every_sample_has_the_same_weight",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "advantages[scored.own], ",
        "advantages[: len(samples)], ",
        "tests/test_trainer.py::test_two_ranks_are_one",
    ),
    Fault(
        "omnirl_hpc/trainer.py",
        "self.sync(step + 1)",
        "self.sync(step)",
        "tests/test_trainer.py::test_every_metric_is_reported",
    ),
    Fault(
        "omnirl_hpc/trainer.py",
        "old[i], i == 0",
        "old[i], True",
        "tests/test_trainer.py::test_engine_and_actor_agree_before_the_first_update",
    ),
    Fault(
        "omnirl_hpc/evaluation/evaluator.py",
        "step % self._config.evaluation.every == 0 or step == self._config.steps",
        "step % self._config.evaluation.every == 0",
        "tests/test_trainer.py::test_an_image_without_a_score_ends_no_run",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "(step % every and step != self._config.steps - 1)",
        "(step % every)",
        "tests/test_trainer.py::test_samples_are_saved",
    ),
    Fault(
        "omnirl_hpc/trainer.py",
        "check_gap(self.algorithm, metrics, self.config.rollout.max_log_prob_gap)",
        "pass",
        "tests/test_trainer.py::test_an_engine_that_is_too_far_off_stops_the_run",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "may_shrink=not strict",
        "may_shrink=True",
        "tests/test_trainer.py::test_how_the_micro_batch_is_fitted",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "self._config.data.text_lengths[-1]",
        "self._config.data.text_lengths[0]",
        "tests/test_trainer.py::test_how_the_micro_batch_is_fitted",
    ),
    Fault(
        "omnirl_hpc/metrics/phases.py",
        "metrics.get(name, 0.0) + taken",
        "taken",
        "tests/test_trainer.py::test_an_image_without_a_score_ends_no_run",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "        self._save_samples(step, samples, scored, groups)\n",
        "",
        "tests/test_trainer.py::test_samples_are_saved",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        "[groups[group].prompt for group in samples.group[:count].tolist()]",
        "[group.prompt for group in groups[:count]]",
        "tests/test_trainer.py::test_two_ranks_are_one",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "batch.group * 2**32 + batch.sample",
        "batch.sample * 2**32 + batch.group",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "config.parts[name].weight * values",
        "values",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "> config.max_failed_fraction * len(rewards)",
        ">= config.max_failed_fraction * len(rewards)",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "torch.searchsorted(identities, identity)",
        "torch.arange(len(identity))",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "torch.bincount(update[self.mask], minlength=updates)",
        "torch.bincount(update, minlength=updates)",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/rewards/jpeg_compressibility.py",
        "return -buffer.tell()",
        "return buffer.tell()",
        "tests/rewards/test_jpeg_compressibility.py",
    ),
    Fault(
        "omnirl_hpc/rewards/ocr.py",
        "        return 1.0\n",
        "        return 0.9\n",
        "tests/rewards/test_ocr.py",
    ),
    Fault(
        "omnirl_hpc/rewards/ocr.py",
        "len(target)) / len(target)",
        "len(target)) / max(len(target), len(recognised))",
        "tests/rewards/test_ocr.py",
    ),
    Fault(
        "omnirl_hpc/metrics/accumulator.py",
        "self._zero()) + weights.sum().double()",
        "self._zero()) + len(weights)",
        "tests/metrics/test_accumulator.py",
    ),
    Fault(
        "omnirl_hpc/metrics/accumulator.py",
        "            dist.all_reduce(summed)\n",
        "",
        "tests/metrics/test_accumulator.py",
    ),
    Fault(
        "omnirl_hpc/metrics/accumulator.py",
        "            dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
        "            dist.all_reduce(largest)",
        "tests/metrics/test_accumulator.py",
    ),
    Fault(
        "omnirl_hpc/metrics/accumulator.py",
        "dist.all_reduce(value, op=dist.ReduceOp.MAX)",
        "dist.all_reduce(value, op=dist.ReduceOp.MIN)",
        "tests/metrics/test_accumulator.py",
    ),
    Fault("omnirl_hpc/metrics/hashes.py", "* (2 * key + 1)", "", "tests/metrics/test_hashes.py"),
    Fault(
        "omnirl_hpc/metrics/hashes.py", "    dist.all_reduce(signed)\n", "", "tests/metrics/test_hashes.py"
    ),
    Fault(
        "omnirl_hpc/metrics/phases.py",
        "        self._enter(outer)",
        "        self.current = outer",
        "tests/metrics/test_phases.py",
    ),
    Fault("omnirl_hpc/hashing.py", "0x1E3779B97F4A7C15 | 1", "0x1E3779B97F4A7C15", "tests/test_hashing.py"),
    Fault(
        "omnirl_hpc/hashing.py",
        "stable_hash(str(tuple(tensor.shape)), str(tensor.dtype))",
        "stable_hash(str(tuple(tensor.shape)))",
        "tests/test_hashing.py",
    ),
    Fault("omnirl_hpc/hashing.py", "+ stable_hash(name) + checksums", "+ checksums", "tests/test_hashing.py"),
    Fault("omnirl_hpc/hashing.py", "sorted(checksums)", "checksums", "tests/test_hashing.py"),
    Fault(
        "omnirl_hpc/layout.py",
        "range(self.replica, num_groups, self.num_replicas)",
        "range(num_groups)[self.replica * (n := num_groups // self.num_replicas) :][:n]",
        "tests/test_layout.py",
    ),
    Fault(
        "omnirl_hpc/layout.py",
        "self.rank // self.replica_size",
        "self.rank % self.num_replicas",
        "tests/test_layout.py",
    ),
    Fault(
        "omnirl_hpc/data/sampler.py",
        "default_rng([seed, epoch])",
        "default_rng([seed])",
        "tests/data/test_sampler.py",
    ),
    Fault(
        "omnirl_hpc/data/sampler.py",
        "seen[prompt.id] * self.samples_per_prompt",
        "seen[prompt.id]",
        "tests/data/test_sampler.py",
    ),
    # actor
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._optimizer.zero_grad()\n        self._pinned.offload()",
        "        self._pinned.offload()",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._optimizer.zero_grad()\n        self._pinned.restore()",
        "        self._pinned.restore()",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._optimizer.zero_grad()\n        return norm, lr",
        "        return norm, lr",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._kept_scheduler = self.scheduler_state()\n",
        "",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self.load_scheduler_state(self._kept_scheduler)\n",
        "",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        '            group["lr"] = lr',
        "            pass",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._require_awake()\n        return self._parameters if",
        "        return self._parameters if",
        "tests/test_residency.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._require_awake()\n        return self._sharded_weights()",
        "        return self._sharded_weights()",
        "tests/test_residency.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._require_awake()\n        limit",
        "        limit",
        "tests/test_residency.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "sharded.set_gradient_divide_factor(1.0)",
        "pass",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "self._guidance = family.guidance(config.sampling)",
        'self._guidance = type(family.guidance(config.sampling))({"text": 1.0})',
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "with self._trained.left_out(self._transformer):",
        "if True:",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "lerp_(value, 1 - blend.decay)",
        "lerp_(value, blend.decay)",
        "tests/actor/test_ema.py",
        "tests/actor/test_policies.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "        self._optimizer.step()\n        self._scheduler.step()",
        "        self._scheduler.step()\n        self._optimizer.step()",
        "tests/actor/test_fsdp.py",
    ),
    Fault(
        "omnirl_hpc/actor/fsdp.py",
        "            *self._stored.values(),\n",
        "",
        "tests/actor/test_ema.py",
        "tests/actor/test_policies.py",
    ),
    Fault(
        "omnirl_hpc/actor/ema.py",
        "min(1 - 1 / (update + 1), limit)",
        "min(1 - 1 / update, limit)",
        "tests/actor/test_ema.py",
    ),
    Fault(
        "omnirl_hpc/actor/optimizer.py",
        "(update + 1) / warmup",
        "update / warmup",
        "tests/actor/test_optimizer.py",
    ),
    Fault(
        "omnirl_hpc/actor/optimizer.py",
        "weight_decay=config.weight_decay",
        "weight_decay=0.0",
        "tests/actor/test_optimizer.py",
    ),
    Fault(
        "omnirl_hpc/actor/update.py", "if not gap <= limit", "if gap > limit", "tests/actor/test_update.py"
    ),
    Fault(
        "omnirl_hpc/actor/update.py",
        "metrics.add_mean(name, values, point.weights)",
        "metrics.add_mean(name, values, torch.ones_like(values))",
        "tests/actor/test_update.py",
    ),
    Fault(
        "omnirl_hpc/models/lora.py",
        "standard_normal(shape, seed, ADAPTER_INIT, name) / rank",
        "standard_normal(shape, seed, ADAPTER_INIT, name)",
        "tests/models/test_lora.py",
    ),
    Fault(
        "omnirl_hpc/models/lora.py",
        "lora_alpha=config.alpha",
        "lora_alpha=config.rank",
        "tests/models/test_lora.py",
    ),
    Fault(
        "omnirl_hpc/models/qwen_image/family.py",
        "torch.norm(conditional, dim=-1, keepdim=True) / torch.norm(combined",
        "torch.norm(combined, dim=-1, keepdim=True) / torch.norm(combined",
        "tests/models/qwen_image/test_family.py",
    ),
    Fault(
        "omnirl_hpc/models/family.py",
        "u + scale * (c - u)",
        "u + (scale - 1) * (c - u)",
        "tests/models/test_families.py",
    ),
    Fault(
        "omnirl_hpc/models/qwen_image/family.py",
        "timesteps[LATENTS].to(dtype) / 1000",
        "(timesteps[LATENTS] / 1000).to(dtype)",
        "tests/models/test_families.py",
    ),
    Fault(
        "omnirl_hpc/models/family.py",
        ".mul(255).round()",
        ".mul(255)",
        "tests/models/test_families.py",
    ),
    Fault(
        "omnirl_hpc/models/family.py",
        "buffer.data = buffer.data.to(dtype)",
        "buffer.data = buffer.data.clone()",
        "tests/models/test_families.py",
    ),
    Fault(
        "omnirl_hpc/models/ltx2/family.py",
        "use_cross_timestep=True",
        "use_cross_timestep=False",
        "tests/models/test_families.py",
    ),
    Fault(
        "omnirl_hpc/models/ltx2/shape.py",
        "MODULATION = 9 + 2 + 5",
        "MODULATION = 9 + 2 + 4",
        "tests/models/test_shape.py",
    ),
    Fault(
        "omnirl_hpc/rewards/loudness.py",
        "10 * np.log10",
        "20 * np.log10",
        "tests/rewards/test_loudness.py",
    ),
    Fault(
        "omnirl_hpc/checks/rules.py",
        "size == 1 or name in spec.engine_parallel",
        "True",
        "tests/checks/test_rules.py",
    ),
    Fault("omnirl_hpc/sync.py", " or receipt.version != version", "", "tests/test_sync.py"),
    Fault("omnirl_hpc/sync.py", "tensor.to(dtype, copy=True)", "tensor.to(dtype)", "tests/test_sync.py"),
    Fault(
        "omnirl_hpc/sync.py", "    if bound != trained:", "    if not trained <= bound:", "tests/test_sync.py"
    ),
    Fault("omnirl_hpc/sync.py", "if held[name] != sent[name]", "if False", "tests/test_sync_weights.py"),
    Fault("omnirl_hpc/residency.py", "        self._holder = side\n", "", "tests/test_residency.py"),
    # plans
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "return 2 if config.sampling.true_cfg_scale > 1 else 1",
        "return 1",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "(window_size(config) + 2)",
        "(window_size(config) + 1)",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "{*range(0, config.steps, every), config.steps - 1}",
        "range(0, config.steps, every)",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "{*range(0, config.steps, every), config.steps - 1}",
        "{*range(every, config.steps, every), config.steps - 1}",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        '"actor: Adam": 2 * weights',
        '"actor: Adam": weights',
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "(3 * trained_bytes(config, shape) + stored",
        "(2 * trained_bytes(config, shape) + stored",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "config.checkpoint.keep + 1",
        "config.checkpoint.keep",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "GATHERED_BLOCKS = 2",
        "GATHERED_BLOCKS = 1",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "samples_per_prompt // layout.world_size",
        "samples_per_prompt // layout.num_replicas",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "config.data.prompts_per_step / layout.num_replicas  # all",
        "config.data.prompts_per_step / layout.world_size  # all",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        'parts["actor: inputs of blocks"] = branches * tokens',
        'parts["actor: inputs of blocks"] = tokens',
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "once = branches if actor_numerics(config).batched_cfg else 1",
        "once = 1",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "values = config.rollout.embedding_cache_size * shape",
        "values = shape",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/estimate.py",
        "return ranks * sum(self.host.values())",
        "return sum(self.host.values())",
        "tests/planning/test_estimate.py",
    ),
    Fault(
        "omnirl_hpc/planning/speed.py",
        "later_updates = 1 - 1 / config.actor.updates_per_step",
        "later_updates = 1",
        "tests/planning/test_speed.py",
    ),
    Fault(
        "omnirl_hpc/planning/speed.py",
        "engine + frozen + 2 * trained",
        "engine + frozen + trained",
        "tests/planning/test_speed.py",
    ),
    # what is written down, moved and allowed
    Fault(
        "omnirl_hpc/config/resume.py",
        '    "steps",\n',
        '    "steps",\n    "seed",\n',
        "tests/config/test_resume.py",
    ),
    Fault(
        "omnirl_hpc/config/resume.py",
        "sorted(saved.keys() | current.keys())",
        "sorted(current.keys())",
        "tests/config/test_resume.py",
    ),
    Fault(
        "omnirl_hpc/run_directory.py",
        "if _step_of(line) < end",
        "if _step_of(line) <= end",
        "tests/test_run_directory.py",
    ),
    Fault(
        "omnirl_hpc/run_directory.py",
        "v if not isinstance(v, float) or math.isfinite(v) else None",
        "v",
        "tests/test_run_directory.py",
    ),
    Fault(
        "omnirl_hpc/metrics/samples.py",
        "reward if math.isfinite(reward) else None",
        "reward if math.isfinite(reward) else 0.0",
        "tests/metrics/test_samples.py",
    ),
    Fault(
        "omnirl_hpc/rewards/call.py",
        "    if len(returned) != count:",
        "    if False:",
        "tests/rewards/test_call.py",
    ),
    Fault(
        "omnirl_hpc/rewards/runner.py",
        "[score if math.isfinite(score) else math.nan for score in scores or [math.nan] * count]",
        "[score if math.isfinite(score) else 0.0 for score in scores or [math.nan] * count]",
        "tests/rewards/test_processes.py",
    ),
    Fault(
        "omnirl_hpc/rewards/gather.py",
        "dict(zip(details, together[1 + len(scores) :]))",
        "dict(zip(details, together[1:]))",
        "tests/rewards/test_gather.py",
    ),
    Fault(
        "omnirl_hpc/pinned.py",
        "if entry.host is None or not entry.frozen]",
        "if entry.host is None]",
        "tests/test_pinned.py",
    ),
    Fault(
        "omnirl_hpc/pinned.py",
        "        if not self.offloaded:\n            _to_host(self._changing())",
        "        _to_host(self._changing())",
        "tests/test_pinned.py",
    ),
    Fault(
        "omnirl_hpc/pinned.py",
        "host.storage_offset() + tensor.storage_offset()",
        "host.storage_offset()",
        "tests/rollout/vllm_omni/test_sleep.py",
    ),
    Fault("omnirl_hpc/planning/residency.py", "0.9", "1.0", "tests/planning/test_residency.py"),
    Fault(
        "omnirl_hpc/models/shape.py",
        "+ 2.5 * self.attention_flops",
        "+ 2 * self.attention_flops",
        "tests/models/qwen_image/test_shape.py",
    ),
    Fault(
        "omnirl_hpc/models/shape.py",
        "rank * sum(i + o for",
        "rank * sum(o + o for",
        "tests/models/test_shape.py",
    ),
    # agreeing on a stop
    Fault(
        "omnirl_hpc/launch/stop.py",
        "        dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n",
        "",
        "tests/launch/test_stop.py",
    ),
    Fault(
        "omnirl_hpc/launch/stop.py",
        "dist.all_reduce(flag, op=dist.ReduceOp.MAX)",
        "dist.all_reduce(flag, op=dist.ReduceOp.MIN)",
        "tests/launch/test_stop.py",
    ),
    # what a run remembers, and from what it goes on
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        'if due or step == self._best["step"]:',
        "if due:",
        "tests/checkpoints/test_run_state.py::test_the_best_one_is_saved_though_none_is_due",
    ),
    Fault(
        "omnirl_hpc/sources/source.py",
        'if state["prompts"] != self._fingerprint:',
        "if False:",
        "tests/sources/test_preferences.py",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        'self._algorithm.load_state_dict(state["algorithm"])',
        "pass",
        "tests/checkpoints/test_run_state.py::test_everything_comes_back",
    ),
    Fault(
        "omnirl_hpc/sources/rollout.py",
        'engine.micro_batch_size = state["micro_batch_size"]',
        "engine.micro_batch_size = 0 + self._config.rollout.micro_batch_size",
        "tests/checkpoints/test_run_state.py::test_everything_comes_back",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        'self._actor.load_scheduler_state(state["schedule"])',
        "pass",
        "tests/checkpoints/test_run_state.py::test_everything_comes_back",
    ),
    Fault(
        "omnirl_hpc/sources/source.py",
        'self._sampler.cursor = state["cursor"]',
        "pass",
        "tests/sources/test_preferences.py",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "load_adapter(path / label(policy))",
        'load_adapter(path / "adapter")',
        "tests/checkpoints/test_run_state.py::test_everything_comes_back",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "        self._save()\n        self._checkpointer.wait()",
        "        self._save()",
        "tests/checkpoints/test_run_state.py::test_the_end_of_a_job_waits_for_a_save_in_the_background",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "    def finish(self) -> None:\n        self._checkpointer.wait()",
        "    def finish(self) -> None:\n        pass",
        "tests/checkpoints/test_run_state.py::test_the_end_of_a_job_waits_for_a_save_in_the_background",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "if path is None and by_rank_0",
        "if False and by_rank_0",
        "tests/checkpoints/test_run_state.py::test_a_run_without_a_whole_checkpoint_does_not_start_over",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "            best and checkpoint_path",
        "            False and checkpoint_path",
        "tests/checkpoints/test_run_state.py::test_everything_comes_back",
    ),
    Fault(
        "omnirl_hpc/sources/source.py",
        "file.seek(max(0, size - block))",
        "pass",
        "tests/checkpoints/test_run_state.py::test_a_fingerprint_tells_files_of_one_size_apart",
    ),
    Fault(
        "omnirl_hpc/checkpoints/run_state.py",
        "self._run.note_return(job, asked)",
        "pass",
        "tests/checkpoints/test_run_state.py::test_a_job_that_went_back_is_known",
    ),
    Fault(
        "omnirl_hpc/checkpoints/checkpointer.py",
        '        write_text(folder / "manifest.json", json.dumps(manifest, indent=1))\n'
        "        self._replace(self._path(step), folder)",
        "        self._replace(self._path(step), folder)\n"
        '        write_text(self._path(step) / "manifest.json", json.dumps(manifest, indent=1))',
        "tests/checkpoints/test_checkpointer.py::test_older_ones_go_when_the_new_one_is_in_its_place",
    ),
    Fault(
        "omnirl_hpc/checkpoints/checkpointer.py",
        '        self._replace(self._path(step), folder)\n        self._point("latest", step)',
        '        self._point("latest", step)\n        self._replace(self._path(step), folder)',
        "tests/checkpoints/test_checkpointer.py::test_older_ones_go_when_the_new_one_is_in_its_place",
    ),
    Fault(
        "omnirl_hpc/checkpoints/checkpointer.py",
        "key=lambda fault: fault.unreadable",
        "key=lambda fault: not fault.unreadable",
        "tests/checkpoints/test_checkpointer.py::test_each_rank_reads_what_it_wrote_and_all_agree",
    ),
    Fault(
        "omnirl_hpc/checkpoints/checkpointer.py",
        'self._everywhere(self._bring_back, "bring',
        'self._everywhere(self._clear, "bring',
        "tests/checkpoints/test_checkpointer.py::test_a_checkpoint_that_was_being_replaced_is_found",
    ),
    Fault(
        "omnirl_hpc/checkpoints/files.py",
        "        if fault.unreadable:",
        "        if False:",
        "tests/checkpoints/test_checkpointer.py::test_what_cannot_be_read_is_not_passed_over",
    ),
    Fault(
        "omnirl_hpc/checkpoints/files.py",
        "    if faults:\n",
        "    if False:\n",
        "tests/checkpoints/test_checkpointer.py::test_none_whole_is_an_error_and_nothing_is_lost",
    ),
    Fault(
        "omnirl_hpc/checkpoints/adapters.py",
        '    lora = scale(lora, peft_config["lora_alpha"] / peft_config["r"])',
        "",
        "tests/checkpoints/test_adapters.py::test_what_is_exported_has_its_strength_in_the_weights",
    ),
    Fault(
        "omnirl_hpc/checkpoints/adapters.py",
        "    follow_umask(folder)",
        "",
        "tests/checkpoints/test_adapters.py::test_files_follow_the_umask",
    ),
    Fault(
        "omnirl_hpc/evaluation/evaluator.py",
        '            "true_cfg_scale": config.sampling.true_cfg_scale,\n',
        "",
        "tests/evaluation/test_evaluator.py::test_what_decides_scores_tells_results_apart",
    ),
    Fault(
        "omnirl_hpc/evaluation/evaluator.py",
        "valid.std() / len(valid) ** 0.5",
        "valid.std()",
        "tests/evaluation/test_evaluator.py::test_the_standard_error_is_that_of_the_mean",
    ),
    Fault(
        "omnirl_hpc/evaluation/results.py",
        "return result if all(",
        "return result if True or all(",
        "tests/evaluation/test_results.py::test_a_result_whose_images_are_not_there_is_none",
    ),
    Fault(
        "omnirl_hpc/report/records.py",
        'return self.metrics[-1]["step"] + 1 if',
        "return len(self.metrics) if",
        "tests/report/test_records.py",
    ),
    Fault(
        "omnirl_hpc/report/records.py",
        "return max(self.steps_reported, next(whole, 0))",
        "return self.steps_reported",
        "tests/report/test_records.py",
    ),
    Fault(
        "omnirl_hpc/sharded_files.py",
        "        if (module, name) not in ALLOWED:",
        "        if False:",
        "tests/test_sharded_files.py",
    ),
    Fault(
        "omnirl_hpc/sharded_files.py",
        '            raise RefusedError(f".metadata names the file',
        '            print(f".metadata names the file',
        "tests/test_sharded_files.py::test_files_elsewhere_are_refused",
    ),
    Fault(
        "omnirl_hpc/metrics/trackers.py",
        "run.last_step_tracked() if",
        "run.last_step() if",
        "tests/metrics/test_trackers.py",
    ),
    Fault(
        "omnirl_hpc/actor/loading.py",
        '    with reading(f"the weights in {folder}", DataError):\n',
        "    if True:\n",
        "tests/actor/test_loading.py::test_files_that_cannot_be_read_are_one_sentence",
    ),
)
