"""The cache of prompt embeddings, and the padded width of a step."""

from __future__ import annotations

import pytest
import torch

from omnirl_hpc.errors import DataError
from omnirl_hpc.rollout.embeddings import EmbeddingCache, padded_length


def test_a_prompt_is_encoded_once():
    encoded = []

    def encode(prompt: str) -> torch.Tensor:
        encoded.append(prompt)
        return torch.full((len(prompt), 2), float(len(encoded)))

    embed = EmbeddingCache(encode, size=8)
    first = embed("cat")
    assert torch.equal(embed("cat"), first)
    assert embed("bird").shape == (4, 2)
    assert encoded == ["cat", "bird"]


def test_the_least_recently_used_prompt_makes_room():
    encoded = []

    def encode(prompt: str) -> torch.Tensor:
        encoded.append(prompt)
        return torch.zeros(1, 1)

    embed = EmbeddingCache(encode, size=2)
    for prompt in ("a", "b", "a", "c"):  # c takes the place of b: a was used after it
        embed(prompt)
    embed("a")
    assert encoded == ["a", "b", "c"]
    embed("b")
    assert encoded == ["a", "b", "c", "b"]


@pytest.mark.parametrize("counts, expected", [([1], 64), ([63, 2], 64), ([64], 128), ([2, 127, 128], 256)])
def test_width_leaves_room_for_one_token_of_padding(counts, expected):
    assert padded_length(counts, [64, 128, 256]) == expected


def test_a_prompt_that_fits_no_width_is_an_error():
    with pytest.raises(DataError, match=r"no width in data.text_lengths=\[64, 128\] holds 128 tokens"):
        padded_length([3, 128], [64, 128])
