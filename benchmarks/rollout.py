"""The rollout engine by itself: seconds an image for several text widths, seconds of a LoRA update, of sleep
and of wake.

    python benchmarks/rollout.py MODEL [--text-tokens 64 --text-tokens 256] [--out FILE] [--profile] [OVERRIDE
    …]

MODEL is a checkpoint (`omnirl-hpc tiny-model /dev/shm/qwen --full-size` makes one with random weights). The
recipe is flowgrpo_qwen_image; each figure is the second of two runs, since the first one compiles. Runs on
one GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from omnirl_hpc.sampling.noise import standard_normal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--text-tokens", type=int, action="append", help="a padded width; may be given several times"
    )
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a micro-batch of the first width"
    )
    options, overrides = parser.parse_known_args()

    from omnirl_hpc.config.load import load_config
    from omnirl_hpc.config.quoting import setting
    from omnirl_hpc.launch.groups import process_group
    from omnirl_hpc.launch.identity import find_identity
    from omnirl_hpc.launch.node_local import use_private_folder
    from omnirl_hpc.launch.rendezvous import Rendezvous
    from omnirl_hpc.launch.runtime import prepare_process

    use_private_folder(os.environ)
    work = Path(tempfile.mkdtemp())
    (work / "prompts.parquet").touch()
    paths = [
        setting(key, str(path))
        for key, path in (
            ("model.path", options.model),
            ("data.prompts", work / "prompts.parquet"),
            ("run_dir", work / "run"),
        )
    ]
    config = load_config(["recipe=flowgrpo_qwen_image", *paths, *overrides]).config
    prepare_process(config.threads_per_rank)
    device = torch.device("cuda", 0)
    with process_group(
        Rendezvous(find_identity(), config.timeout_seconds, "benchmark of the rollout"), device
    ):
        rows = {}
        for name, value in measure(config, options, device):
            print(f"{name}: {value:.3f}", flush=True)
            rows[name] = value
    lines = [
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}; overrides: "
        f"{' '.join(overrides) or 'none'}",
        "",
    ]
    lines += ["| " + " | ".join(rows) + " |", "|" + "---|" * len(rows)]
    lines += ["| " + " | ".join(f"{value:.3f}" for value in rows.values()) + " |", "", ""]
    print(table := "\n".join(lines))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(table)


def measure(config, options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, float]]:
    from omnirl_hpc.config.classes import find_class
    from omnirl_hpc.layout import make_layout
    from omnirl_hpc.metrics.attention import observe_attention
    from omnirl_hpc.metrics.phases import PhaseTimer
    from omnirl_hpc.rollout import make_engine
    from omnirl_hpc.sync import deliver_lora

    family = find_class("model", config.model.family)(config.model)
    timer = PhaseTimer(device)
    engine = make_engine(config, family, make_layout(config, 0, 1), device, timer)
    observe_attention(engine.transformer, lambda kernels: print(f"attention kernel: {kernels}", flush=True))
    state = random_adapter(config, family, device)
    size = engine.micro_batch_size

    yield "LoRA update and receipt s", second(lambda: deliver_lora(engine, state, 0))
    yield "update alone s", second(lambda: engine._lora.write(state))

    def generate(requests: list) -> None:
        for _ in engine.generate(requests):
            pass

    for tokens in options.text_tokens or [128]:
        requests = make_requests(tokens, size)

        yield f"{tokens} tokens: s/image", second(partial(generate, requests)) / size
        if options.profile and tokens == (options.text_tokens or [128])[0]:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                generate(requests)
                torch.cuda.synchronize()
            print(
                profile.key_averages().table(
                    sort_by="cuda_time_total", row_limit=30, max_name_column_width=100
                ),
                flush=True,
            )
    if config.residency == "swap":
        sleeps = [(seconds(engine.sleep), seconds(engine.wake)) for _ in range(2)]
        yield "sleep s", sleeps[1][0]
        yield "wake s", sleeps[1][1]
    yield "peak GiB", torch.cuda.max_memory_allocated() / 2**30


def random_adapter(config, family, device: torch.device) -> dict[str, Tensor]:
    """Of the rank and for the modules of the recipe, in bf16."""
    from diffusers import QwenImageTransformer2DModel

    from omnirl_hpc.models.lora import add_lora, lora_parameters

    with torch.device("meta"):
        settings = QwenImageTransformer2DModel.load_config(config.model.path, subfolder="transformer")
        transformer = QwenImageTransformer2DModel.from_config(settings)
        add_lora(transformer, config.actor.lora, family.spec.lora_targets, torch.float32, seed=0)
    slots = lora_parameters(transformer)
    return {name: (0.01 * torch.randn(slot.shape, device=device)).bfloat16() for name, slot in slots.items()}


def make_requests(tokens: int, count: int) -> list:
    from omnirl_hpc.rollout.engine import SampleRequest
    from omnirl_hpc.sampling.samples import SampleIdentity
    from omnirl_hpc.sampling.windows import Window

    text, negative = (
        {"embeds": standard_normal((length, 3584), name).bfloat16()}
        for name, length in (("text", tokens - 8), ("negative", 8))
    )
    return [
        SampleRequest(SampleIdentity(0, 0, "prompt", i), 0, Window(i % 4, 2), text, negative, tokens)
        for i in range(count)
    ]


def second(function: Callable[[], object]) -> float:
    seconds(function)
    return seconds(function)


def seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
