"""The arithmetic of every family is that of its models. Expected values: the models."""

from __future__ import annotations

import json

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from omnirl_hpc.config.schema import LoraConfig, ModelConfig
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.models.lora import add_lora, lora_parameters
from omnirl_hpc.models.shape import count_parameters, describe
from omnirl_hpc.models.spec import Guidance
from tests.models.families import FamilyCase, parameters


def blocks(case: FamilyCase, transformer: nn.Module) -> dict[str, nn.Module]:
    classes = case.family.spec.block_classes
    return {name: m for name, m in transformer.named_modules() if type(m).__name__ in classes}


def block_linears(case: FamilyCase, transformer: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        f"{block}.{name}": (linear.in_features, linear.out_features)
        for block, module in blocks(case, transformer).items()
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    }


def stored(module: nn.Module) -> int:
    """What its file holds: buffers, too, such as the mean of a VAE's latents, and shared tensors once."""
    return sum({tensor.data_ptr(): tensor.numel() for tensor in module.state_dict().values()}.values())


def test_published_model(case: FamilyCase):
    network = case.family.spec.components["transformer"].classes[0]
    with torch.device("meta"):
        transformer = getattr(diffusers, network)(**case.shape_module.PUBLISHED)
        parts = {name: parameters(module) for name, module in case.facts.published_parts().items()}
    shape = case.family.spec.shape(ModelConfig(family=case.name, path="-", **case.facts.size))
    assert shape.transformer_parameters == parameters(transformer) == case.facts.transformer_parameters
    assert shape.other_parameters == parts == case.shape_module.PUBLISHED_PARTS
    assert shape.linears == block_linears(case, transformer)
    assert shape.block_parameters == max(map(parameters, blocks(case, transformer).values()))
    assert "as published" in shape.source


def test_a_checkpoint(case: FamilyCase):
    shape, pipeline = case.shape, case.family.load_pipeline(torch.float32)
    transformer = pipeline.transformer
    assert shape.transformer_parameters == parameters(transformer)
    assert shape.other_parameters == {
        name: stored(getattr(pipeline, name)) for name in case.family.spec.modules if name != "transformer"
    }
    assert shape.linears == block_linears(case, transformer)
    assert shape.block_parameters == max(map(parameters, blocks(case, transformer).values()))
    assert shape.modulation_parameters == sum(
        parameter.numel()
        for name, parameter in transformer.named_parameters()
        if case.facts.modulation in name and name.startswith(tuple(blocks(case, transformer)))
    )
    assert shape.layers == len(blocks(case, transformer))
    assert shape.latent_values == sum(x[0].numel() for x in case.initial().values())
    assert str(case.checkpoint) in shape.source
    with torch.no_grad():
        condition = case.conditions(case.family.load_encoders(torch.float32), ("a cat",))
    width = case.family.condition_width(["a cat"], [256])
    values = sum(x.numel() for x in condition.values() if x.is_floating_point())
    assert shape.condition_values(width) == values


@pytest.mark.parametrize("targets", ["published", "of attention", "one layer"])
def test_lora_is_what_peft_makes(case: FamilyCase, targets):
    shape, transformer = case.shape, case.family.load_transformer(torch.float32)
    some_layer = list(shape.linears)[-1].split(".", 2)[2]
    given = {"published": None, "of attention": ["to_q", "to_out.0"], "one layer": [some_layer]}[targets]
    names = given or case.family.spec.lora_targets
    add_lora(transformer, LoraConfig(rank=4), names, torch.float32, seed=0)
    made = lora_parameters(transformer)
    assert shape.lora_parameters(4, given) == sum(parameter.numel() for parameter in made.values())
    assert shape.lora_layers(given) * shape.layers == pytest.approx(len(made) / 2)
    if given is None:
        assert len(made) == 2 * case.facts.adapted


def test_flops_are_what_torch_counts(case: FamilyCase):
    """Of the blocks: the layers around them are not in the formula. The counter knows attention only as
    matrix products.
    """
    pipeline = case.family.load_pipeline(torch.float32)
    conditions = case.conditions(pipeline, ("a cat",))
    latents = {name: x[:1] for name, x in case.initial().items()}
    times = {name: torch.full((1,), 500.0) for name in latents}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        case.family.velocity(
            pipeline.transformer,
            latents,
            times,
            conditions,
            None,
            Guidance({}),
            case.family.spec.numerics["diffusers"],
        )
    counts = counter.get_flop_counts()
    name = type(pipeline.transformer).__name__
    counted = sum(sum(counts[f"{name}.{block}"].values()) for block in blocks(case, pipeline.transformer))
    width = case.family.condition_width(["a cat"], [256])
    assert counted == pytest.approx(case.shape.forward_flops(width), rel=1e-3)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/vae has no safetensors files"):
        count_parameters(tmp_path / "vae")


@pytest.mark.parametrize("content", [b"", b"\x40\x00\x00\x00\x00\x00\x00\x00{", b"\xff" * 100])
def test_a_torn_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors is not a whole safetensors file"):
        count_parameters(tmp_path)


def test_parameters_of_all_files_are_counted(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4), "c": torch.zeros(())}, tmp_path / "model-2.safetensors")
    assert count_parameters(tmp_path) == 6 + 4 + 1


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"num_layers": 2})[:-1])
    with pytest.raises(ConfigError, match="transformer/config.json cannot be read"):
        describe(ModelConfig(path=str(tmp_path)), "a model", {}, {})
