"""The actor by itself: milliseconds and GPU memory of a forward pass and of forward + backward, for several
settings.

    python benchmarks/actor_update.py [--layers 8] [--text-tokens 128] [--profile] "" "actor.compile=true
    actor.attention=cudnn" …

Each argument is one variant: overrides of recipe=flowgrpo_qwen_image ("" is the recipe itself). The
transformer is Qwen-Image's with fewer layers and random weights, so that a variant takes seconds; times are
given for one guidance branch of one image and scaled to 60 layers, memory is extrapolated from two depths.
Runs on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path

import torch

FULL_DEPTH = 60
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="print the kernels of each variant")
    options = parser.parse_args()

    from omnirl_hpc.launch.groups import process_group
    from omnirl_hpc.launch.identity import find_identity
    from omnirl_hpc.launch.node_local import use_private_folder
    from omnirl_hpc.launch.rendezvous import Rendezvous

    use_private_folder(os.environ)
    work = Path(tempfile.mkdtemp())
    shallow, deep = options.layers // 2, options.layers
    for layers in (shallow, deep):
        write_model(work / f"{layers}", layers)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.text_tokens} text tokens, "
        f"{deep} layers"
    )
    print("| overrides | forward ms | forward + backward ms | peak GiB at 60 layers |\n|---|---|---|---|")
    device = torch.device("cuda", 0)
    with process_group(
        Rendezvous(find_identity(), timeout_seconds=600, purpose="benchmark of the actor"), device
    ):
        for variant in options.variants:
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()
            try:
                low = measure(work, shallow, options, variant.split(), device)[2]
                forward, both, high = measure(work, deep, options, variant.split(), device)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                print(
                    f"| {variant or 'the recipe'} | {type(error).__name__}: {str(error)[:200]} | | |",
                    flush=True,
                )
                continue
            scale = FULL_DEPTH / deep
            peak = low + (high - low) / (deep - shallow) * (FULL_DEPTH - shallow)
            print(
                f"| {variant or 'the recipe'} | {forward * scale:.1f} | {both * scale:.1f} | {peak:.1f} |",
                flush=True,
            )


def write_model(folder: Path, layers: int) -> None:
    from diffusers import QwenImageTransformer2DModel

    from omnirl_hpc.models.qwen_image.tiny import SCHEDULER

    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        QwenImageTransformer2DModel(num_layers=layers).save_pretrained(folder / "transformer")
        torch.set_default_dtype(torch.float32)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (folder / "model_index.json").write_text("{}")
    (folder / "prompts.parquet").touch()


def measure(work: Path, layers: int, options: argparse.Namespace, overrides: list[str], device: torch.device):
    """Milliseconds of forward, and of forward + backward, for each image and guidance branch; peak GiB of the
    latter.
    """
    from omnirl_hpc.actor.fsdp import FSDPActor
    from omnirl_hpc.config.classes import find_class
    from omnirl_hpc.config.load import load_config
    from omnirl_hpc.layout import make_layout
    from omnirl_hpc.metrics.attention import observe_attention
    from omnirl_hpc.policies import CURRENT
    from omnirl_hpc.sampling.streams import LATENTS

    paths = [
        f"model.path={work}/{layers}",
        f"data.prompts={work}/{layers}/prompts.parquet",
        f"run_dir={work}/run",
    ]
    config = load_config(["recipe=flowgrpo_qwen_image", *paths, *overrides]).config
    family = find_class("model", config.model.family)(config.model)
    actor = FSDPActor(config, family, make_layout(config, 0, 1), device)
    observe_attention(actor.transformer, lambda kernels: print(f"attention kernel: {kernels}", flush=True))
    point = make_point(family, config, options.text_tokens, device)
    images = 2 * config.actor.micro_batch_size

    def forward() -> None:
        with torch.no_grad():
            actor.velocity(point, CURRENT)

    def both() -> None:
        actor.velocity(point, CURRENT)[LATENTS].square().mean().backward()

    times = [timed(forward) / images, timed(both) / images]
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated() / 2**30
    if options.profile and layers == options.layers:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            both()
            torch.cuda.synchronize()
        print(
            profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=100),
            flush=True,
        )
    return *times, peak


def make_point(family, config, tokens: int, device: torch.device):
    from omnirl_hpc.algorithms.algorithm import TrainingPoint
    from omnirl_hpc.sampling.streams import LATENTS

    size = config.actor.micro_batch_size

    def text(valid: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(tokens, device=device) < valid).expand(size, tokens)
        return {
            "embeds": torch.randn(size, tokens, 3584, device=device, dtype=torch.bfloat16),
            "mask": mask,
        }

    latents = torch.randn(size, *family.stream_shapes()[LATENTS], device=device)
    ones = torch.ones(size, device=device)
    return TrainingPoint(
        latents={LATENTS: latents},
        timesteps={LATENTS: 500 * ones},
        conditions=text(tokens - 8),
        negative=text(8),
        weights=ones,
    )


def timed(function) -> float:
    function()  # warm-up
    function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS


if __name__ == "__main__":
    main()
