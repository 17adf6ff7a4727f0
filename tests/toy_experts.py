"""The toy family with two networks that take turns: the first at much noise, the second at little."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.toy_family import Toy, ToyDriver, ToyTransformer, write_toy

BOUNDARY = 800.0  # timesteps of the video from which on the first makes the step
SECOND = "transformer_2"


def write_toy_experts(out: Path) -> None:
    """A checkpoint in diffusers' layout."""
    write_toy(out)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ToyTransformer().save_pretrained(out / SECOND)
    index = json.loads((out / "model_index.json").read_text())
    (out / "model_index.json").write_text(json.dumps(index | {SECOND: index["transformer"]}))


class ToyExpertsDriver(ToyDriver):
    """See ToyDriver."""

    def load(self, dtype: torch.dtype) -> Any:
        pipeline, path = super().load(dtype), self.family.config.path
        pipeline.transformer_2 = ToyTransformer.from_pretrained(path, subfolder=SECOND).to(dtype)
        return pipeline


class ToyExperts(Toy):
    """See ModelFamily."""

    spec = replace(
        Toy.spec,
        components={**Toy.spec.components, SECOND: Toy.spec.components["transformer"]},
        experts=("transformer", SECOND),
    )

    def driver(self, engine: str) -> ToyExpertsDriver:
        return {"diffusers": ToyExpertsDriver}[engine](self)

    def experts_at(self, timesteps: dict[str, Tensor]) -> Tensor:
        return (timesteps["video"] < BOUNDARY).long()
