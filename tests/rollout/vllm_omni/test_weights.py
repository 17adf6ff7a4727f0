"""All weights in the real vLLM-Omni engine, by its own loader: on one rank, and split over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omnirl_hpc.sync import confirm_weights, send_weights
from tests.helpers import run_ranks
from tests.rollout.vllm_omni.engine_cases import Bench, distance, equal, error_of, tensors
from tests.sync_cases import ALL, SOME, TEARS, Torn, Weights


def load(model: Path, prompts: Path, out: Path, ranks: int) -> dict[str, Any]:
    bench = Bench(model, prompts, out)
    config = bench.config("vllm_omni", train="full")
    first, second = Weights(config, seed=1), Weights(config, seed=2)
    plain = bench.engine("diffusers", train="full")
    engine = bench.engine(train="full", tensor_parallel_size=ranks)

    def sync(engine, weights, asleep: bool = True):
        if asleep:
            engine.sleep()
        sent = send_weights(weights, engine, torch.float32, 1)
        engine.wake()
        return confirm_weights(engine, sent, 1)

    expected = {
        seed: (sync(plain, weights), bench.generate(plain)) for seed, weights in ((1, first), (2, second))
    }
    receipt = sync(engine, first)
    made = bench.generate(engine)
    found: dict[str, Any] = {
        "bound": len(receipt.bound),
        "receipts equal": receipt == expected[1][0],
        "distance": distance(made, expected[1][1]),
        "moved": distance(expected[2][1], expected[1][1]),
        "latents": tensors(made)["latents"],
    }
    engine.sleep()
    engine.wake()
    found["woken equal"] = equal(bench.generate(engine), made)
    sync(engine, second, asleep=False)
    found["awake distance"] = distance(bench.generate(engine), expected[2][1])
    engine.sleep()
    engine.wake()
    found["then woken distance"] = distance(bench.generate(engine), expected[2][1])
    found["torn"] = [
        error_of(sync, Torn(engine, tear), first if i % 2 else second)
        for i, tear in enumerate((*TEARS, TEARS[0]))
    ]
    first.names = {SOME: "transformer_blocks.1.attn.nothing.weight"}
    found["misnamed"] = error_of(sync, engine, first)
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_weights(ranks: int, tiny_model: Path, tiny_prompts: Path, tmp_path: Path):
    found = run_ranks(ranks, load, tiny_model, tiny_prompts, tmp_path, ranks, deadline=300)
    for result in found:
        assert result["bound"] == ALL
        assert result["receipts equal"]  # what is read back of fused and split layers is what diffusers holds
        assert result["distance"] <= 1e-5 < 1e-2 < result["moved"]
        assert result["woken equal"]
        assert result["awake distance"] <= 1e-5 and result["then woken distance"] <= 1e-5
        not_loaded_but_equal, *torn = result["torn"]  # the second weights were there already
        assert not_loaded_but_equal == ""
        assert len(torn) == len(TEARS)
        for error in torn:
            assert (
                "SyncError: weights version 1: the engine computes with other values" in error
                and SOME in error
            )
        assert (
            "only in the actor: transformer_blocks.1.attn.nothing.weight; only in the engine: "
            in result["misnamed"]
        )
        assert "transformer_blocks.1.attn.to_qkv.weight, part 0" in result["misnamed"]
        assert torch.equal(result["latents"], found[0]["latents"])
