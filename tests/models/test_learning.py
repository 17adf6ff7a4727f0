"""Algorithms that need no trajectory learn from every family: gradients reach every adapted layer that the
output depends on, of every stream. Expected losses: where the current policy is still the old one or the
reference.
"""

from __future__ import annotations

import math

import pytest
import torch

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import accumulate_gradients
from omnirl_hpc.algorithms.units import Batch, Pairs
from omnirl_hpc.config.classes import find_class
from omnirl_hpc.config.load import load_config
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.sampling.samples import SampleIdentity, Samples
from tests.helpers import ALONE, CPU, go_on, one_rank_group
from tests.models.families import PROMPTS, FamilyCase

NEEDED = ("sampling.true_cfg_scale=1.0", "actor.micro_batch_size=2", "sampling.num_inference_steps=4")


def unit_rows(case: FamilyCase, algorithm: str) -> Samples | Pairs:
    """One unit for each prompt, of latents that were drawn."""
    latents, rows = case.initial(), torch.arange(len(PROMPTS))
    text = case.conditions(case.family.load_encoders(torch.float32))
    conditions = [{name: x[i] for name, x in text.items()} for i in rows.tolist()]
    identity = [SampleIdentity(0, 0, str(i), 0) for i in rows.tolist()]
    if algorithm == "dpo":
        rejected = {name: x.flip(0) for name, x in latents.items()}
        return Pairs(identity, rows, conditions, latents, rejected)
    return Samples(identity, rows, conditions, None, latents, 0 * rows, rows)


@pytest.mark.parametrize("name", ["diffusion_nft", "dpo"])
def test_every_adapted_layer_learns(case: FamilyCase, tiny_prompts, tmp_path, name):
    recipe = {"diffusion_nft": "diffusionnft_tiny", "dpo": "dpo_tiny"}[name]
    paths = (f"model.path={case.checkpoint}", f"data.prompts={tiny_prompts}", f"run_dir={tmp_path}")
    config = load_config([f"recipe={recipe}", *paths, *case.settings, *NEEDED]).config
    algorithm = find_class("algorithm", name)(config)
    units = unit_rows(case, name)
    batch = Batch(units, torch.ones(len(units)), torch.full((len(units),), 1 / len(units)))
    schedules, metrics = case.family.schedules(4), Accumulator(CPU)
    with one_rank_group():
        actor = FSDPActor(config, case.family, ALONE, CPU, algorithm.policies)
        points = list(algorithm.points_of([batch], schedules))
        assert points[0].latents.keys() == case.facts.streams.keys()
        accumulate_gradients(actor, algorithm, points, metrics, go_on)
        gradients = {name: g.clone() for name, g in actor.gradients() if ".lora_B." in name}
        reached = {name for name, gradient in gradients.items() if gradient.abs().max() > 0}
        adapted = {name for name in actor._parameters if ".lora_B." in name}
        assert len(adapted) == case.facts.adapted
        assert adapted - reached == {f"{layer}.lora_B.weight" for layer in case.facts.unread}
        norm, _ = actor.apply_gradients()
        made = metrics.reduce()
    assert 0 < norm < math.inf
    if name == "dpo":  # both policies are equal: -log sigmoid(0) at every level of noise
        assert made["loss"] == pytest.approx(math.log(2))
