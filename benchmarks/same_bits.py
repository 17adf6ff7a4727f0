"""Does a checkout compute the same as another one, to the bit?

    python benchmarks/same_bits.py BEFORE AFTER WORK

Both checkouts make the same strict runs of the tiny recipe on two ranks: as it is, with all that keeps or
compares policies (running mean, reference, evaluation), with all weights. AFTER also makes the last step from
a checkpoint of BEFORE. `omnirl-hpc compare` of AFTER tells whether two runs are equal. The runs of BEFORE
stay in WORK and are not made again. Exit 0: all equal; 1: not, and which.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

STEPS = 3
SMALL = (
    "recipe=flowgrpo_tiny",
    "determinism=strict",
    "model.height=32",
    "model.width=48",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "sampling.num_inference_steps=4",
    "sampling.window.last=3",
    "rollout.micro_batch_size=2",
    "actor.micro_batch_size=1",
    "actor.lora.rank=4",
    "checkpoint.every=1",
    f"steps={STEPS}",
)
VARIANTS = {
    "plain": (),
    "policies": (
        "actor.ema_decay=0.9",
        "algorithm.kl_coef=0.1",
        "actor.activation_checkpointing=true",
        "evaluation.every=2",
        "evaluation.num_prompts=2",
        "evaluation.num_inference_steps=3",
        "sampling.window.per=sample",
    ),
    "full": ("actor.train=full", "actor.optimizer.lr=1e-4", "algorithm.old_log_prob=rollout"),
}


def program(checkout: Path, *arguments: str, ranks: int = 1) -> int:
    """Run a command of a checkout, on one rank or with torchrun; returns its exit code."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    environ = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "omnirl_hpc", *arguments]
    return subprocess.run(command, cwd=checkout, env=environ, check=False).returncode


def train(checkout: Path, work: Path, run_dir: Path, *overrides: str) -> None:
    paths = (f"run_dir={run_dir}", f"model.path={work / 'tiny'}", f"data.prompts={work / 'prompts.parquet'}")
    if program(checkout, "train", *SMALL, *paths, *overrides, ranks=2):
        sys.exit(f"the run {run_dir} of {checkout} failed")


def main(before: Path, after: Path, work: Path) -> int:
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tiny").exists():
        program(before, "tiny-model", str(work / "tiny"))
        program(
            before, "prompts", str(work / "prompts.parquet"), "--kind", "ocr", "--count", "16", "--seed", "0"
        )
    shutil.rmtree(work / "after", ignore_errors=True)
    different = []
    for name, overrides in VARIANTS.items():
        straight, made, resumed = (
            work / place for place in (f"before/{name}", f"after/{name}", f"after/{name}_resumed")
        )
        if not (straight / "checkpoints" / f"step_{STEPS:06d}").exists():
            train(before, work, straight, *overrides)
        train(after, work, made, *overrides)
        shutil.copytree(straight, resumed)
        train(after, work, resumed, *overrides, f"checkpoint.resume_step={STEPS - 1}")
        different += [run for run in (made, resumed) if program(after, "compare", str(straight), str(run))]
    print(f"different: {', '.join(map(str, different))}" if different else "all runs are equal to the bit")
    return int(bool(different))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*(Path(argument).resolve() for argument in sys.argv[1:])))
