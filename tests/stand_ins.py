"""Stand-ins for files that are looked at but never loaded. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from omnirl_hpc.models.spec import ANY, FamilySpec

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


def write_descriptions_of(spec: FamilySpec, folder: Path) -> None:
    """The same of any family: each component with the first class and settings that the family accepts."""
    index = {name: ["", component.classes[0]] for name, component in spec.components.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": spec.pipeline_classes[0], **index}))
    for name, component in spec.components.items():
        accepted = {key: values[0] for key, values in (component.settings or {}).items() if values is not ANY}
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file).write_text(json.dumps({"_class_name": component.classes[0], **accepted}))
