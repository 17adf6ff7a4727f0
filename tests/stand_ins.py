"""Stand-ins for files that are looked at but never loaded. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

CLASSES = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
}


def write_descriptions(folder: Path, **transformer: object) -> Path:
    """A checkpoint of Qwen-Image without weights: its index, and settings of transformer and scheduler."""
    index = {"_class_name": "QwenImagePipeline", **{name: list(entry) for name, entry in CLASSES.items()}}
    for name, settings in (
        ("model_index.json", index),
        ("transformer/config.json", {"_class_name": CLASSES["transformer"][1], **transformer}),
        ("scheduler/scheduler_config.json", {"_class_name": CLASSES["scheduler"][1], "shift": 1.0}),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(settings))
    return folder
