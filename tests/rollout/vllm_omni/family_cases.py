"""What tests of a family's vLLM-Omni pipeline do on a rank: the same requests to both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
    model: Path, prompts: Path, out: Path, settings: tuple[str, ...], lora: str
) -> dict[str, Any]:
    """Largest differences of latents and log-probabilities between vLLM-Omni and diffusers with PEFT: of the
    base, and with a random adapter.
    """
    common = ("rollout.micro_batch_size=2", "actor.lora.rank=6", "sampling.window.last=2", *settings)

    def engine(name: str, *overrides: str) -> RolloutEngine:
        config = make_config(model, prompts, out, f"rollout={name}", *common, *overrides)
        layout = make_layout(config, dist.get_rank(), dist.get_world_size())
        family = find_class("model", config.model.family)(config.model)
        return make_engine(config, family, layout, CPU, PhaseTimer(CPU))

    stock = engine("diffusers")
    omni = engine("vllm_omni", f"rollout.lora={lora}")
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
    encoded = [(stock.encode(prompt), omni.encode(prompt)) for prompt in (*PROMPTS, NEGATIVE)]
    found: dict[str, Any] = {
        "conditions equal": all(torch.equal(a[name], b[name]) for a, b in encoded for name in a)
    }

    def generate(engine: RolloutEngine) -> Samples:
        return Samples.cat(list(engine.generate(requests)))

    base = generate(omni)
    found["base"] = distance(base, generate(stock))
    slots = lora_parameters(stock._pipeline.transformer)
    adapter = {name: 0.2 * standard_normal(slot.shape, 1, name) for name, slot in slots.items()}
    found["bound"] = len(deliver_lora(omni, adapter, 1).bound)
    deliver_lora(stock, adapter, 1)
    adapted = generate(omni)
    found |= {"adapted": distance(adapted, generate(stock)), "moved": distance(adapted, base)}
    return found


def distance(one: Samples, other: Samples) -> float:
    """The largest difference of clean latents and of log-probabilities."""
    streams = [(one.clean[name], other.clean[name]) for name in one.clean]
    pairs = [*streams, (one.trajectory.log_probs, other.trajectory.log_probs)]
    return max(float((a - b).abs().max()) for a, b in pairs)
