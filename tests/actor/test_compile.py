"""Compiled blocks: one graph for all of them, the gradients of eager blocks, and never eager in silence."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.actor.compile import compile_blocks, repeated_blocks
from tests.actor.cases import SAMPLES, gradients, largest_difference, make_actor, make_points
from tests.helpers import make_config, one_rank_group


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that dynamo makes. They run as they are: code generation is torch's own affair and takes a
    compiler.
    """
    made, compile = [], torch.compile

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile(function, backend=backend, **options)
    )
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "trains", ["algorithm.kl_coef=0.1", "actor.train=full"]
)  # LoRA switches its adapters
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_compiled_blocks_give_the_same_gradients(
    graphs, tiny_model, tiny_prompts, tmp_path, checkpointing, trains
):
    overrides = (f"actor.activation_checkpointing={checkpointing}", trains)
    eager = make_config(tiny_model, tiny_prompts, tmp_path, *overrides)
    compiled = make_config(tiny_model, tiny_prompts, tmp_path, *overrides, "actor.compile=true")
    with one_rank_group():
        expected = gradients(make_actor(eager), eager, make_points(eager, range(SAMPLES), micro_batch=4))
        assert not graphs
        made = gradients(make_actor(compiled), compiled, make_points(compiled, range(SAMPLES), micro_batch=4))
    assert len(graphs) <= 6, len(graphs)
    assert largest_difference(made, expected) < 1e-6


def test_a_block_that_cannot_be_one_graph_is_an_error(graphs):
    class Block(torch.nn.Module):
        def forward(self, x):
            print("a graph break")
            return x + 1

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

    transformer = Transformer()
    assert repeated_blocks(transformer, ["Block"]) == [transformer.block]
    compile_blocks([transformer.block])
    with pytest.raises(Exception, match="print"):
        transformer.block(torch.ones(1))
