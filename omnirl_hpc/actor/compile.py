"""torch.compile of the actor's repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

RECOMPILE_LIMIT = 64  # a graph for each text width, with and without gradients, adapters on and off


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each repeated block by itself: one graph serves all of them, and FSDP's hooks stay outside of
    it.

    A shape that would need more graphs than the limit is an error, never a silent return to eager.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)


def repeated_blocks(transformer: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """The layers that make up most of a network, by the names of their classes. Raises ValueError where there
    are none: such a network would be neither sharded nor compiled.
    """
    blocks = [module for module in transformer.modules() if type(module).__name__ in classes]
    if not blocks:
        raise ValueError(f"{type(transformer).__name__} has no blocks of class {', '.join(classes)}")
    return blocks
