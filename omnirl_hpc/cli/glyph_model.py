"""`omnirl-hpc glyph-model OUT`: a checkpoint that learns to spell within minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc.cli.tiny_model import make_folder


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "omnirl-hpc glyph-model",
        description="Write Glyph, a small pretrained Qwen-Image that draws short words (9 MB).",
    )
    parser.add_argument("out", type=Path, help="folder to write")
    options = parser.parse_args(arguments)
    make_folder(options.out)
    from omnirl_hpc.launch.runtime import prepare_process

    prepare_process(threads_per_rank=1)
    from omnirl_hpc.models.qwen_image.glyph import write_glyph

    write_glyph(options.out)
    print(f"wrote {options.out}")
