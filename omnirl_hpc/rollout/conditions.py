"""Conditions of prompts, computed once per prompt and kept in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.sampling.samples import Condition


class ConditionCache:
    """An LRU cache around an engine's encoders. Conditions are on the CPU, unpadded, and the same object for
    the same prompt.
    """

    def __init__(self, encode: Callable[[Prompt], Condition], size: int) -> None:
        self._encode = encode
        self._size = size
        self._known: OrderedDict[Hashable, Condition] = OrderedDict()

    def __call__(self, prompt: Prompt) -> Condition:
        key = prompt.prompt, tuple(sorted(prompt.media.items()))
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._known[key] = {name: tensor.cpu() for name, tensor in self._encode(prompt).items()}
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return self._known[key]
