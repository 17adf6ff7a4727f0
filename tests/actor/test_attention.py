"""The actor's attention kernel is the one that was asked for, or the run does not start."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from omnirl_hpc.actor.attention import BACKENDS, set_attention
from omnirl_hpc.checks.rules import ACTOR_ATTENTION
from omnirl_hpc.errors import ConfigError


@pytest.fixture
def transformer(tiny_model):
    return QwenImageTransformer2DModel.from_pretrained(tiny_model, subfolder="transformer")


def backend_of(transformer):
    return transformer.transformer_blocks[0].attn.processor._attention_backend


def test_every_name_is_a_backend_of_diffusers():
    assert tuple(BACKENDS) == ACTOR_ATTENTION
    assert set(BACKENDS.values()) <= {backend.value for backend in AttentionBackendName}


def test_cudnn_is_set_where_a_gpu_is(transformer):
    before = _AttentionBackendRegistry.get_active_backend()
    set_attention(transformer, "cudnn", torch.device("cuda"))
    assert backend_of(transformer) == AttentionBackendName._NATIVE_CUDNN
    assert (
        _AttentionBackendRegistry.get_active_backend() == before
    )  # the engine in this process keeps its own


def test_sdpa_leaves_diffusers_default(transformer):
    before = backend_of(transformer)
    set_attention(transformer, "sdpa", torch.device("cpu"))
    assert backend_of(transformer) == before


@pytest.mark.parametrize("name", ["flash_attn", "fa3"])
def test_a_missing_package_is_an_error(transformer, name):
    with pytest.raises(ConfigError, match=f"actor.attention={name}: .*missing package"):
        set_attention(transformer, name, torch.device("cuda"))


def test_a_cpu_has_sdpa_only(transformer):
    with pytest.raises(ConfigError, match="actor.attention=cudnn needs a GPU: use sdpa"):
        set_attention(transformer, "cudnn", torch.device("cpu"))
