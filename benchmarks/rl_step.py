"""Complete RL steps at full size, on one or more GPUs: seconds by phase, memory, images a second.

    python benchmarks/rl_step.py MODEL [--keep-model] [--out FILE] [OVERRIDE …]
    torchrun --nproc-per-node 2 benchmarks/rl_step.py MODEL …

MODEL is a checkpoint; `omnirl-hpc tiny-model /dev/shm/qwen --full-size` makes one with random weights, which
change neither speed nor memory. Unless --keep-model is given, its weight files are deleted once both sides
have read them, so that a folder in /dev/shm leaves room for the pinned copies. The recipe is
flowgrpo_qwen_image with 64 images a step instead of 512.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

RECIPE = (
    "recipe=flowgrpo_qwen_image",
    "reward=jpeg_compressibility",
    "steps=3",
    "data.prompts_per_step=4",
    "checkpoint.every=1000",
)
COLUMNS = {
    "images_per_second": "images/s",
    "time/step": "step s",
    "time/rollout": "rollout",
    "time/decode": "decode",
    "time/swap": "swap",
    "time/old_log_prob": "old log-prob",
    "time/actor": "actor",
    "time/sync": "sync",
    "time/other": "other",
    "memory/rollout_peak": "GPU rollout GiB",
    "memory/actor_peak": "GPU actor GiB",
    "memory/host_peak": "host GiB",
    "ratio/first_update_max_abs_log": "max abs d log p",
    "grad_norm": "grad norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument("--keep-model", action="store_true")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of the third optimizer update by their time"
    )
    options, overrides = parser.parse_known_args()

    from omnirl_hpc.launch.runtime import forbid_downloads

    forbid_downloads()  # read once, when the hub's libraries are imported
    from omnirl_hpc.cli.train import run
    from omnirl_hpc.config.quoting import setting
    from omnirl_hpc.data.ocr_prompts import write_ocr_table
    from omnirl_hpc.launch.identity import find_identity
    from omnirl_hpc.launch.node_local import use_private_folder

    use_private_folder(os.environ)  # all ranks use one folder, whose name others can foresee
    rank = find_identity().rank
    work = (
        Path(tempfile.gettempdir()) / f"omnirl_rl_step_{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    )
    run_dir, prompts = (
        work / "run",
        work / f"prompts_{rank}.parquet",
    )  # the same table for each rank, so that none waits for it
    work.mkdir(exist_ok=True)
    write_ocr_table(str(prompts), count=64, seed=0)
    if not options.keep_model:
        delete_weights_when_read(options.model)
    if options.profile:
        profile_update(number=3)
    paths = {"model.path": options.model, "data.prompts": prompts, "run_dir": run_dir}
    run([*RECIPE, *(setting(key, str(path)) for key, path in paths.items()), *overrides])
    if rank == 0:
        report(run_dir, overrides, options.out)


def delete_weights_when_read(model: Path) -> None:
    """The actor is built before the engine: when the engine's worker is there, nobody reads the files any
    more.
    """
    import torch.distributed as dist

    from omnirl_hpc.rollout.vllm_omni import engine

    import_vllm_omni = engine.import_vllm_omni

    def import_and_patch(device):
        versions = import_vllm_omni(device)  # the one way into vllm; what is below imports it, too
        from omnirl_hpc.rollout.vllm_omni import loading

        make_worker = loading.make_worker

        def make_worker_and_delete(*arguments):
            worker = make_worker(*arguments)
            dist.barrier()
            if dist.get_rank() == 0:
                for file in model.glob("transformer/*.safetensors"):
                    file.unlink()
            return worker

        loading.make_worker = make_worker_and_delete
        return versions

    engine.import_vllm_omni = import_and_patch


def profile_update(number: int) -> None:
    """Print where the GPU's time goes in one update's forward and backward passes."""
    import itertools

    import torch

    from omnirl_hpc import trainer

    accumulate, calls = trainer.accumulate_gradients, itertools.count(1)

    def accumulate_and_profile(*arguments, **keywords):
        if next(calls) != number:
            return accumulate(*arguments, **keywords)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            accumulate(*arguments, **keywords)
            torch.cuda.synchronize()
        print(
            profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90),
            flush=True,
        )

    trainer.accumulate_gradients = accumulate_and_profile


def report(run_dir: Path, overrides: list[str], out: Path | None) -> None:
    """A row for each step; the first one includes warm-up (allocations, kernels, compilation)."""
    environment = json.loads((run_dir / "environment.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    kernels = ", ".join(
        f"{name} {value}"
        for name, value in environment["choices"].items()
        if name.startswith("attention kernel")
    )
    lines = [f"overrides: {' '.join(overrides) or 'none'}", f"versions: {versions}", kernels, ""]
    lines += ["| step | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for text in (run_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(text)
        lines.append(
            f"| {metrics['step']} | " + " | ".join(f"{metrics.get(name, 0):.4g}" for name in COLUMNS) + " |"
        )
    table = "\n".join(lines) + "\n\n"
    print(table)
    if out is not None:
        with out.open("a") as file:
            file.write(table)


if __name__ == "__main__":
    main()
