"""What the tests of the vLLM-Omni engine do on each rank. Imports of vllm take seconds, so each process does
much.

Every function runs in spawned processes, returns plain values, and leaves judging to the tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.errors import OmniRLError
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.engine import RolloutEngine, SampleRequest
from omnirl_hpc.rollout.vllm_omni.importing import TORCH_SETTINGS
from omnirl_hpc.sampling.noise import standard_normal
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sampling.windows import Window
from omnirl_hpc.sync import deliver_lora
from tests.helpers import CPU, make_config

PROMPTS = tuple(  # of unequal lengths
    Prompt(str(i), text) for i, text in enumerate(("a red cat", "two very blue dogs under a tree"))
)
NEGATIVE = Prompt("", " ")


class Bench:
    """Both engines on this rank, and the requests that they are asked."""

    def __init__(self, model: Path, prompts: Path, out: Path) -> None:
        self.paths = model, prompts, out
        self.diffusers = self.engine(rollout="diffusers")
        negative = self.diffusers.encode(NEGATIVE)
        self.requests = [
            SampleRequest(
                SampleIdentity(0, 0, prompt.id, sample),
                group,
                Window(sample % 2, 2),
                self.diffusers.encode(prompt),
                negative,
                256,
            )
            for group, prompt in enumerate(PROMPTS)
            for sample in range(2)
        ]

    def config(self, rollout: str, train: str = "lora", **settings: Any) -> Config:
        overrides = ("rollout.micro_batch_size=4", "actor.lora.rank=6", f"actor.train={train}")
        config = make_config(*self.paths, f"rollout={rollout}", *overrides)
        for name, value in settings.items():
            setattr(config.rollout, name, value)
        return config

    def engine(self, rollout: str = "vllm_omni", **settings: Any) -> RolloutEngine:
        config = self.config(rollout, **settings)
        layout = make_layout(config, dist.get_rank(), dist.get_world_size())
        return make_engine(config, QwenImage(config.model), layout, CPU, PhaseTimer(CPU))

    def adapter(self, seed: int) -> dict[str, Tensor]:
        """A random adapter of rank 6: neither the rank nor alpha / rank is one that vllm rounds to or scales
        exactly by.
        """
        slots = lora_parameters(self.diffusers._pipeline.transformer)
        return {name: 0.2 * standard_normal(slot.shape, seed, name) for name, slot in slots.items()}

    def generate(self, engine: RolloutEngine, requests: list[SampleRequest] | None = None) -> Samples:
        return Samples.cat(list(engine.generate(self.requests if requests is None else requests)))

    def reference(self, seed: int) -> Samples:
        """diffusers with PEFT."""
        deliver_lora(self.diffusers, self.adapter(seed), version=seed)
        return self.generate(self.diffusers)


def tensors(made: Samples) -> dict[str, Tensor]:
    """Everything that is generated."""
    return {
        "latents": made.trajectory.latents[LATENTS],
        "log_probs": made.trajectory.log_probs,
        "sigmas": made.trajectory.sigmas[LATENTS],
        "timesteps": made.trajectory.timesteps[LATENTS],
        "clean": made.clean[LATENTS],
        "frames": made.media.frames,
        "group": made.group,
        "sample": made.sample,
        "noise_hash": made.noise_hash,
        "version": made.version,
    }


def equal(one: Samples, other: Samples) -> bool:
    others = tensors(other)
    return all(torch.equal(tensor, others[name]) for name, tensor in tensors(one).items())


def distance(one: Samples, other: Samples) -> float:
    """The largest difference of latents and log-probabilities."""
    first, second = tensors(one), tensors(other)
    return max(float((first[name] - second[name]).abs().max()) for name in ("latents", "log_probs"))


def error_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except OmniRLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def process_state() -> list[Any]:
    return [
        sys.stdout,
        sys.stderr,
        Path("/proc/self/cmdline").read_bytes(),
        *(read() for read, _ in TORCH_SETTINGS),
    ]


def alone(model: Path, prompts: Path, out: Path) -> dict[str, Any]:
    """One rank: base weights, adapters, batches, sleep, and what the engine does to its process."""
    bench = Bench(model, prompts, out)
    environment, process = dict(os.environ), process_state()
    engine = bench.engine()
    changed = {n for n in environment.keys() | os.environ.keys() if environment.get(n) != os.environ.get(n)}
    found: dict[str, Any] = {
        "changed": changed,
        "process is as it was": process_state() == process,
        "embeddings equal": all(
            torch.equal(engine.encode(p)["embeds"], bench.diffusers.encode(p)["embeds"])
            for p in (*PROMPTS, NEGATIVE)
        ),
        "base equal": equal(bench.generate(engine), bench.generate(bench.diffusers)),
    }
    base = bench.generate(engine)
    alone = [bench.generate(engine, [request]) for request in bench.requests]
    found["alone and in a batch"] = distance(Samples.cat(alone), base)
    found["base requires grad"] = (
        base.trajectory.latents[LATENTS] * torch.ones((), requires_grad=True)
    ).requires_grad

    found |= {f"adapter {key}": value for key, value in _with_lora(bench, engine).items()}
    engine.close()
    merged = bench.engine(lora="merged")
    found |= {f"merged {key}": value for key, value in _with_lora(bench, merged).items()}
    merged.close()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    found["default group works"] = float(ones)
    return found


def _with_lora(bench: Bench, engine: RolloutEngine) -> dict[str, Any]:
    first, second = bench.adapter(1), bench.adapter(2)
    receipt = deliver_lora(engine, first, 1)
    one = bench.generate(engine)
    found: dict[str, Any] = {"modules": len(receipt.bound), "distance": distance(one, bench.reference(1))}
    deliver_lora(engine, second, 2)
    two = bench.generate(engine)
    found |= {"moved": distance(two, one), "second distance": distance(two, bench.reference(2))}
    engine.sleep()
    found["asleep"] = [
        error_of(bench.generate, engine),
        error_of(engine.encode, PROMPTS[0]),
        error_of(engine.load_lora, first, 3),
        error_of(engine.sleep),
    ]
    engine.wake()
    found["woken equal"] = equal(bench.generate(engine), two)
    engine.sleep()
    engine.wake()
    deliver_lora(engine, first, 1)
    found["old weights again equal"] = equal(bench.generate(engine), one)
    misnamed = {name.replace("img_mlp.net.2", "img_mlp.nothing"): tensor for name, tensor in first.items()}
    found["bad target"] = error_of(deliver_lora, engine, misnamed, 4)
    # Not trained any more: a part of a fused layer, and a whole layer, which hold values of the first adapter
    untrained = {name for name in first if ".to_k." in name or ".img_mlp.net.2." in name}
    without = {name: tensor for name, tensor in first.items() if name not in untrained}
    deliver_lora(engine, first, 4)
    found["fewer modules"] = len(deliver_lora(engine, without, 5).bound)
    deliver_lora(bench.diffusers, first | {name: first[name] * 0 for name in untrained}, 5)
    found["fewer distance"] = distance(bench.generate(engine), bench.generate(bench.diffusers))
    sent = {name: tensor.clone() for name, tensor in first.items()}
    deliver_lora(engine, sent, 6)
    found["sent tensors untouched"] = all(torch.equal(sent[name], first[name]) for name in first)
    return found


def parallel(model: Path, prompts: Path, out: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replicas of several ranks: each of `settings` on all ranks of this job, one after the other."""
    bench = Bench(model, prompts, out)
    references = {0: bench.generate(bench.diffusers), 1: bench.reference(1)}
    environment = dict(os.environ)
    results = []
    for setting in settings:
        engine = bench.engine(**setting)
        found: dict[str, Any] = {"distance": distance(bench.generate(engine), references[0])}
        found["modules"] = len(deliver_lora(engine, bench.adapter(1), 1).bound)
        made = bench.generate(engine)
        found |= {
            "lora distance": distance(made, references[1]),
            "latents": made.trajectory.latents[LATENTS],
            "log_probs": made.trajectory.log_probs,
        }
        engine.sleep()
        engine.wake()
        found["woken equal"] = equal(bench.generate(engine), made)
        engine.close()
        results.append(found)
    watched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    results[-1]["ranks kept"] = all(environment.get(name) == os.environ.get(name) for name in watched)
    return results
