"""The tokenizer of the tiny checkpoint."""

from __future__ import annotations

from omnirl_hpc.models.qwen_image.tiny import byte_tokenizer


def test_it_has_one_token_for_each_byte():
    tokenizer = byte_tokenizer()
    text = "café 漢字\n"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer("<|im_start|>a").input_ids) == "<|im_start|>a"
