"""Prompt embeddings, computed once per prompt and kept in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from omnirl_hpc.errors import DataError


class EmbeddingCache:
    """An LRU cache around an engine's text encoder. Values are [L, D] on the CPU, unpadded."""

    def __init__(self, encode: Callable[[str], Tensor], size: int) -> None:
        self._encode = encode
        self._size = size
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, prompt: str) -> Tensor:
        if prompt in self._known:
            self._known.move_to_end(prompt)
        else:
            self._known[prompt] = self._encode(prompt).cpu()
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return self._known[prompt]


def padded_length(token_counts: list[int], lengths: list[int]) -> int:
    """The smallest of `lengths` that is greater than every count.

    Greater, not equal: at least one token of padding keeps an attention mask in every batch. Pipelines drop a
    mask of all ones and then take another kernel, which would make a sample's value depend on its neighbours.
    Raises DataError where none is.
    """
    longest = max(token_counts)
    for length in lengths:
        if length > longest:
            return length
    raise DataError(f"no width in data.text_lengths={lengths} holds {longest} tokens and one of padding")
