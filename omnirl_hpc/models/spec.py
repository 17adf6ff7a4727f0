"""What a model family states about itself, as data: rules and plans read it before torch is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omnirl_hpc.config.classes import MODULES, find_class, is_import_path
from omnirl_hpc.config.schema import Config, ModelConfig
from omnirl_hpc.models.shape import ModelShape

# Setting of a component -> the values that the family can train with; ANY: whatever the file says.
Settings = Mapping[str, tuple[Any, ...] | None]
ANY = None


@dataclass(frozen=True)
class ComponentSpec:
    """What one component of a checkpoint may be: a folder with a configuration file in diffusers' layout."""

    classes: tuple[str, ...]  # names in diffusers or transformers
    # Every setting that the component's file may have. None: the class decides, whatever its settings.
    settings: Settings | None = None


def flow_matching_scheduler(**settings: tuple[Any, ...] | None) -> ComponentSpec:
    """diffusers' Euler scheduler of flow matching. `settings`: what a family accepts, if not all."""
    free = (
        "shift",
        "use_dynamic_shifting",
        "base_shift",
        "max_shift",
        "base_image_seq_len",
        "max_image_seq_len",
        "shift_terminal",
        "time_shift_type",
    )
    # Other orders and spacings of sigmas than transitions and windows are written for; the last is noise in
    # every step, which the ODE steps of a rollout leave out
    off = (
        "invert_sigmas",
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "stochastic_sampling",
    )
    return ComponentSpec(
        classes=("FlowMatchEulerDiscreteScheduler",),
        settings={
            "num_train_timesteps": (1000,),  # timesteps are 1000 sigma
            **dict.fromkeys(free, ANY),
            **dict.fromkeys(off, (False,)),
            **settings,
        },
    )


@dataclass(frozen=True)
class Numerics:
    """How an engine computes a velocity, where pipelines of a family differ: the actor computes in the same
    way.
    """

    batched_cfg: bool = False  # both branches of guidance as one batch, not one after the other
    round_timestep: bool = False  # the timestep is rounded to the model's dtype


@dataclass(frozen=True)
class Guidance:
    """The scales of classifier-free guidance, by names that the family knows."""

    scales: dict[str, float]


@dataclass(frozen=True)
class FamilySpec:
    """What a family is. The checkpoints that it can train are those described here; everything else is
    refused by name before weights load.
    """

    title: str  # for messages
    pipeline_classes: tuple[str, ...]  # model_index.json's _class_name; classes of diffusers
    components: Mapping[str, ComponentSpec]  # by the name of their folder
    numerics: Mapping[str, Numerics]  # the engines that have a driver, by their names in rollout.engine
    pixel_multiple: int  # of height and width: pixels of a latent token
    max_text_tokens: int  # longer prompts are an error
    # The denoising network's layers, by their classes: sharded, checkpointed and compiled one by one
    block_classes: tuple[str, ...]
    lora_targets: tuple[str, ...]  # PEFT target_modules of the published recipes
    latent_tokens: Callable[[ModelConfig], int]  # of one sample, which engines split over ranks
    # What plans compute with. Raises ConfigError where the checkpoint's files are damaged
    shape: Callable[[ModelConfig], ModelShape]
    # How vLLM-Omni's pipeline may be spread over ranks: settings of rollout
    engine_parallel: tuple[str, ...] = ("tensor_parallel_size", "ulysses_degree", "cfg_parallel_size")
    tokenizer: str = "tokenizer"  # the folder of the one that decides how long a prompt is
    text_width: int | None = None  # of every condition; None: it is padded to one of data.text_lengths
    # Networks that take turns at denoising, by their folders, of one class; a LoRA adapts all in the same way
    experts: tuple[str, ...] = ("transformer",)
    frame_step: int | None = None  # a video has a multiple of it and one more frames; None: images are made
    makes: tuple[str, ...] = ("image",)  # image | video | audio | text: what rewards can be given

    @property
    def modules(self) -> tuple[str, ...]:
        """The components that have weights."""
        return tuple(name for name in self.components if name != "scheduler")


def find_spec(family: str) -> FamilySpec:
    """What a family of ours states (torch is not imported), or one of the user's own as module:Class."""
    if is_import_path(family):
        return find_class("model", family).spec
    folder, _, _ = MODULES["model"].format(family).rpartition(".")
    return importlib.import_module(f"{folder}.spec").SPEC


def actor_numerics(config: Config) -> Numerics:
    """How the actor computes: as the engine does, where actor.cfg does not choose."""
    engine = find_spec(config.model.family).numerics[config.rollout.engine]
    return replace(
        engine, batched_cfg=engine.batched_cfg if config.actor.cfg is None else config.actor.cfg == "batched"
    )
