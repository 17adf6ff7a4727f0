"""Makes and scores the images of policies: the same prompts and initial noise for each, ODE steps alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnirl_hpc.actor.actor import Actor
from omnirl_hpc.config.schema import Config, RewardPartConfig
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.data.sampler import Group
from omnirl_hpc.errors import OutputError
from omnirl_hpc.evaluation.results import read_result, write_comparison, write_result
from omnirl_hpc.hashing import stable_hash
from omnirl_hpc.launch.agreement import by_rank_0, raise_on_all_ranks
from omnirl_hpc.layout import Layout
from omnirl_hpc.metrics.media_files import picture_suffix, write_media
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.policies import CURRENT, REFERENCE, label
from omnirl_hpc.rewards.gather import ScoredStep
from omnirl_hpc.rewards.reward import metadata_columns
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.rollout.requests import condition_width
from omnirl_hpc.run_directory import RunDirectory, writing
from omnirl_hpc.sampling.samples import Media, Samples
from omnirl_hpc.sources.generation import Generation, NoGeneration
from omnirl_hpc.sync import deliver_lora

NO_STEP = -1  # stands for the training step in the identity of a draw

Lora = dict[str, Tensor]


def collect_policies(actor: Actor, dtype: torch.dtype, last: str = CURRENT) -> dict[str, Lora]:
    """What training has to compare, in the engine's dtype, by label: the reference, every policy that the
    actor holds, `last` at the end. Collective.

    In host memory: the device has no room for all beside the engine.
    """
    held = {policy: on_host(dict(actor.weights(policy)), dtype) for policy in actor.policies}
    ordered = [*(policy for policy in held if policy != last), last]
    return {label(REFERENCE): without_effect(held[CURRENT])} | {label(p): held[p] for p in ordered}


def on_host(lora: Lora, dtype: torch.dtype) -> Lora:
    """A copy, since a full tensor may be the actor's own."""
    return {name: tensor.to("cpu", dtype, copy=True) for name, tensor in lora.items()}


def without_effect(lora: Lora) -> Lora:
    """The adapter that leaves the base as it is."""
    return {name: torch.zeros_like(tensor) for name, tensor in lora.items()}


def make_evaluator(
    config: Config,
    family: ModelFamily,
    layout: Layout,
    device: torch.device,
    generation: Generation | NoGeneration,
    run: RunDirectory,
) -> Evaluator | None:
    """None where evaluation.every is 0."""
    if isinstance(generation, NoGeneration) or not config.evaluation.every:
        return None
    return Evaluator(config, family, layout, device, generation, run.evaluation, run.writing)


class Evaluator:
    """Compares policies with the engine, which must have the device and keeps the last one's adapter. All
    methods are collective.

        folder/base/              images of the base model, and result.json once all are there
        folder/step_000010/       adapter/, ema/, … with the same; comparison.md, a table, and comparison.jpg,
                                  side by side

    What is there already from the same adapter and settings is not made again.
    """

    def __init__(
        self,
        config: Config,
        family: ModelFamily,
        layout: Layout,
        device: torch.device,
        generation: Generation,
        folder: Path,
        writing: Callable[[Path], AbstractContextManager[None]] = writing,
    ) -> None:
        """writing: entered around every write to `folder` (RunDirectory.writing).

        Raises DataError for prompts that cannot be used: now, and not at the first evaluation.
        """
        evaluation = config.evaluation
        # As if this were a training step of a run with other draws.
        data = replace(config.data, samples_per_prompt=evaluation.samples_per_prompt)
        self._config = replace(config, seed=evaluation.seed, data=data)
        # An image without a score is left out of the means, and no reason to end a run; only a reward that
        # scores nothing at all is.
        count = evaluation.num_prompts * evaluation.samples_per_prompt
        self._forgiving = replace(config.reward, max_failed_fraction=1 - 0.5 / count)
        self._layout, self._device, self._generation = layout, device, generation
        self._folder, self._writing = folder, writing
        path = evaluation.prompts or config.data.prompts
        table = PromptTable(path, metadata_columns(config.reward))
        self._groups = [
            Group(index, prompt, 0) for index, prompt in enumerate(table.first(evaluation.num_prompts))
        ]
        self._settings: dict[str, Any] = {
            "model": config.model.path,
            "engine": [config.rollout.engine, config.rollout.dtype],
            "reward": {name: _definition(part) for name, part in config.reward.parts.items()},
            "prompts": f"{stable_hash(*(str(group.prompt) for group in self._groups)):016x}",
            "negative_prompt": config.data.negative_prompt,
            "samples_per_prompt": evaluation.samples_per_prompt,
            "num_inference_steps": evaluation.num_inference_steps,
            "true_cfg_scale": config.sampling.true_cfg_scale,
            "text_length": condition_width(config, family, self._groups),
            "size": [config.model.height, config.model.width],
            "seed": evaluation.seed,
        }

    def is_due(self, step: int) -> bool:
        """After `step` steps of training."""
        return step % self._config.evaluation.every == 0 or step == self._config.steps

    def collect(self, actor: Actor, last: str) -> dict[str, Lora]:
        """See `collect_policies`."""
        return collect_policies(actor, getattr(torch, self._config.rollout.dtype), last)

    @property
    def measure(self) -> str:
        """Tells scores that can be compared with each other from others. The model is the run's, wherever it
        lies.
        """
        settings = {name: value for name, value in self._settings.items() if name != "model"}
        return f"{stable_hash(json.dumps(settings, sort_keys=True)):016x}"

    def requests(self) -> list[SampleRequest]:
        """What this rank's replica generates for each policy."""
        return self._generation.requests(self._config, NO_STEP, self._groups, window=None)

    def compare(
        self, policies: dict[str, Lora], step: int, check_stop: Callable[[], None]
    ) -> dict[str, float]:
        """The mean reward of each policy, given on any device, of the run after `step` steps.

        `check_stop` is called after each micro-batch.
        """
        requests, place = self.requests(), f"step_{step:06d}"
        results = []
        for policy, lora in policies.items():
            checksum = self._deliver(lora, step)
            folder = policy if policy == label(REFERENCE) else f"{place}/{policy}"
            results.append(
                {"policy": policy, "folder": folder, **self._evaluate(folder, checksum, requests, check_stop)}
            )
        self._write(lambda: write_comparison(self._folder, place, results), here=self._layout.rank == 0)
        return {result["policy"]: result["reward"] for result in results}

    def _deliver(self, lora: Lora, step: int) -> str:
        """Make the engine compute with an adapter; returns its checksum. It is on the device for no longer
        than that.
        """
        self._generation.wake_engine()
        return deliver_lora(
            self._generation.engine, {name: tensor.to(self._device) for name, tensor in lora.items()}, step
        ).checksum

    def _evaluate(
        self, name: str, checksum: str, requests: list[SampleRequest], check_stop: Callable[[], None]
    ) -> dict[str, Any]:
        folder, settings = self._folder / name, self._settings | {"adapter": checksum}
        # what rank 0 sees of a shared folder, all go by
        result = by_rank_0(lambda: read_result(folder), OutputError)
        if result is not None and result["settings"] == settings:
            return result
        num_steps = settings["num_inference_steps"]
        batch = self._generation.roll_out(requests, self._groups, check_stop, num_steps)
        scored = self._generation.score(batch, self._forgiving)
        media = batch.media
        assert media is not None  # of what is generated
        self._write(lambda: self._save_media(folder, batch, media))
        result = {"settings": settings, **self._scores(scored, picture_suffix(media))}
        self._write(lambda: write_result(folder, result), here=self._layout.rank == 0)
        return result

    def _write(self, action: Callable[[], None], here: bool = True) -> None:
        """Do `action` on the ranks where it is `here`. Where it fails on one, all raise OutputError.
        Collective.
        """

        def write() -> None:
            if here:
                with self._writing(self._folder):
                    action()

        raise_on_all_ranks(write, OutputError)

    def _save_media(self, folder: Path, batch: Samples, media: Media) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for i, (group, sample) in enumerate(zip(batch.group.tolist(), batch.sample.tolist())):
            write_media(folder / _file_stem(group, sample), media[i : i + 1])

    def _scores(self, scored: ScoredStep, suffix: str) -> dict[str, Any]:
        """The same on every rank: samples are ordered by prompt, and all are there."""
        valid = scored.rewards[scored.mask]
        samples = [
            {
                "file": _file_stem(group, i % self._config.evaluation.samples_per_prompt) + suffix,
                "prompt": self._groups[group].prompt.prompt,
                "id": self._groups[group].prompt.id,
                "reward": reward if counts else None,
            }
            for i, (group, reward, counts) in enumerate(
                zip(scored.groups.tolist(), scored.rewards.tolist(), scored.mask.tolist())
            )
        ]
        return {
            "reward": float(valid.mean()),
            "standard_error": float(valid.std() / len(valid) ** 0.5) if len(valid) > 1 else 0.0,
            "parts": {
                name: float(scores[torch.isfinite(scores)].mean())
                for name, scores in (scored.parts | scored.components).items()
            },
            "samples": samples,
        }


def _definition(part: RewardPartConfig) -> dict[str, str]:
    """The settings of a reward that decide scores."""
    names = {field.name for field in fields(part)} - {"workers", "timeout_seconds"}
    return {name: str(getattr(part, name)) for name in sorted(names)}


def _file_stem(group: int, sample: int) -> str:
    return f"{group:04d}_{sample:02d}"
