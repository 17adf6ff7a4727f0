"""What tests of a family's vLLM-Omni pipeline do on a rank: the same requests to both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from omnirl_hpc.config.classes import find_class
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.engine import RolloutEngine, SampleRequest
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.windows import Window
from omnirl_hpc.sync import deliver_lora
from tests.helpers import CPU, make_config

PROMPTS = tuple(Prompt(str(i), text) for i, text in enumerate(("a red cat", "two very blue dogs")))
NEGATIVE = Prompt("", "blurry")


def engines_side_by_side(
    model: Path, prompts: Path, out: Path, settings: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """For both values of rollout.lora, largest differences of latents and log-probabilities between vLLM-Omni
    and diffusers with PEFT: of the base, and with a random adapter.
    """
    common = ("rollout.micro_batch_size=2", "actor.lora.rank=6", "sampling.window.last=2", *settings)

    def engine(name: str, *overrides: str) -> RolloutEngine:
        config = make_config(model, prompts, out, f"rollout={name}", *common, *overrides)
        layout = make_layout(config, dist.get_rank(), dist.get_world_size())
        family = find_class("model", config.model.family)(config.model)
        return make_engine(config, family, layout, CPU, PhaseTimer(CPU))

    stock = engine("diffusers")
    config = make_config(model, prompts, out, *common)
    family = find_class("model", config.model.family)(config.model)
    texts = [prompt.prompt for prompt in (*PROMPTS, NEGATIVE)]
    width = family.condition_width(texts, config.data.text_lengths)
    negative = stock.encode(NEGATIVE)
    requests = [
        SampleRequest(
            SampleIdentity(0, 0, prompt.id, sample),
            group,
            Window(sample, 1),
            stock.encode(prompt),
            negative,
            width,
        )
        for group, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]

    def generate(engine: RolloutEngine) -> Samples:
        return Samples.cat(list(engine.generate(requests)))

    slots = lora_parameters(stock._pipeline.transformer)
    adapter = {name: 0.2 * standard_normal(slot.shape, 1, name) for name, slot in slots.items()}
    before = generate(stock)
    deliver_lora(stock, adapter, 1)
    after = generate(stock)

    def compare(omni: RolloutEngine) -> dict[str, Any]:
        encoded = [(stock.encode(prompt), omni.encode(prompt)) for prompt in (*PROMPTS, NEGATIVE)]
        base = generate(omni)
        bound = deliver_lora(omni, adapter, 1).bound
        adapted = generate(omni)
        omni.close()
        return {
            "conditions": max(float((a[name] - b[name]).abs().max()) for a, b in encoded for name in a),
            "base": distance(base, before),
            "bound": len(bound),
            "adapted": distance(adapted, after),
            "moved": distance(adapted, base),
        }

    return {lora: compare(engine("vllm_omni", f"rollout.lora={lora}")) for lora in ("adapter", "merged")}


def distance(one: Samples, other: Samples) -> float:
    """The largest difference of clean latents and of log-probabilities."""
    streams = [(one.clean[name], other.clean[name]) for name in one.clean]
    pairs = [*streams, (one.trajectory.log_probs, other.trajectory.log_probs)]
    return max(float((a - b).abs().max()) for a, b in pairs)
