"""The cache of conditions."""

from __future__ import annotations

import torch

from omnirl_hpc.data.prompts import MediaRef, Prompt
from omnirl_hpc.rollout.conditions import ConditionCache


class Encoder:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []

    def __call__(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        self.asked.append(prompt)
        return {"embeds": torch.full((len(prompt.prompt), 2), float(len(self.asked)))}


def test_a_prompt_is_encoded_once_and_its_samples_share_the_tensors():
    encoder = Encoder()
    encode = ConditionCache(encoder, size=8)
    first = encode(Prompt("0", "cat"))
    assert encode(Prompt("7", "cat", target="CAT")) is first  # the model reads neither id nor target
    assert encode(Prompt("0", "bird"))["embeds"].shape == (4, 2)
    assert [prompt.prompt for prompt in encoder.asked] == ["cat", "bird"]


def test_media_are_part_of_what_the_model_reads():
    encoder = Encoder()
    encode = ConditionCache(encoder, size=8)
    images = [
        Prompt("0", "cat", media={"image": (MediaRef("t.parquet", 0, row, "image"),)}) for row in (0, 1)
    ]
    conditions = [encode(prompt) for prompt in (*images, Prompt("0", "cat"), images[0])]
    assert len(encoder.asked) == 3 and conditions[3] is conditions[0]


def test_the_least_recently_used_prompt_makes_room():
    encoder = Encoder()
    encode = ConditionCache(encoder, size=2)
    for text in ("a", "b", "a", "c", "a"):  # c takes the place of b: a was used after it
        encode(Prompt("0", text))
    assert [prompt.prompt for prompt in encoder.asked] == ["a", "b", "c"]
    encode(Prompt("0", "b"))
    assert [prompt.prompt for prompt in encoder.asked] == ["a", "b", "c", "b"]
