"""The reference engine: the stock pipeline's images, samples that do not depend on their neighbours, a true
record.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.data.prompts import Prompt, PromptTable
from omnirl_hpc.data.sampler import GroupSampler
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.family import DenoisingInputs
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.models.spec import Numerics
from omnirl_hpc.rollout import make_engine
from omnirl_hpc.rollout.batching import micro_batches
from omnirl_hpc.rollout.conditions import ConditionCache
from omnirl_hpc.rollout.requests import make_requests
from omnirl_hpc.sampling import transition
from omnirl_hpc.sampling.samples import Samples, stack_conditions
from omnirl_hpc.sampling.streams import LATENTS
from omnirl_hpc.sampling.windows import Window
from omnirl_hpc.sync import collect_lora, deliver_lora
from tests.helpers import ALONE, CPU, fill_adapter, make_config, one_rank_group

MICRO_BATCH = 8


class Rollout:
    """An engine whose adapter is not the initial, idle one, and the requests of one step."""

    def __init__(self, config):
        self.config = config
        self.family = QwenImage(config.model)
        self.engine = make_engine(config, self.family, ALONE, CPU, PhaseTimer(CPU))
        self.transformer = self.engine._pipeline.transformer
        fill_adapter(self.transformer, seed=1)
        groups = GroupSampler(PromptTable(config.data.prompts), 4, 2, config.seed).next_groups()
        cache, window = ConditionCache(self.engine.encode, 16), config.sampling.window
        self.requests = make_requests(config, self.family, cache, ALONE, 0, groups, window)

    def generate(self, requests=None):
        return Samples.cat(list(self.engine.generate(self.requests if requests is None else requests)))

    def velocity(self, batch, latents, timesteps):
        with torch.no_grad():
            return self.family.velocity(
                self.transformer,
                {LATENTS: latents},
                {LATENTS: timesteps},
                stack_conditions(batch.conditions),
                stack_conditions(batch.negative),
                self.family.guidance(self.config.sampling),
                Numerics(),
            )[LATENTS]


@pytest.fixture(scope="module")
def rollout(tiny_model, tiny_prompts, tmp_path_factory) -> Rollout:
    run_dir = tmp_path_factory.mktemp("run")
    return Rollout(make_config(tiny_model, tiny_prompts, run_dir, f"rollout.micro_batch_size={MICRO_BATCH}"))


@pytest.fixture(scope="module")
def batch(rollout):
    return rollout.generate()


def same(first, second) -> bool:
    """Bitwise equality of everything that is generated."""
    return all(
        torch.equal(a, b)
        for a, b in (
            *((getattr(first, name), getattr(second, name)) for name in ("group", "sample")),
            *(
                (getattr(first.trajectory, name)[LATENTS], getattr(second.trajectory, name)[LATENTS])
                for name in ("latents", "sigmas", "timesteps")
            ),
            (first.trajectory.log_probs, second.trajectory.log_probs),
            (first.media.frames, second.media.frames),
            (first.clean[LATENTS], second.clean[LATENTS]),
        )
    )


def drawn_noise(rollout, requests):
    """(initial [B, S, C], of the transitions [B, W, S, C]) noise of a whole micro-batch of requests."""
    ((batch, _),) = micro_batches(requests, MICRO_BATCH, rollout.family, CPU)
    return batch.initial[LATENTS], batch.noise[LATENTS]


def test_trajectories_hold_what_training_needs(rollout, batch):
    made, images = batch.trajectory, batch.media.frames
    assert len(batch) == 8
    assert made.latents[LATENTS].shape == (8, 3, 6, 16)  # W + 1 edges of a window of 2
    assert batch.clean[LATENTS].shape == (8, 6, 16)
    assert made.latents[LATENTS].dtype == batch.clean[LATENTS].dtype == torch.float32
    assert made.log_probs.shape == made.timesteps[LATENTS].shape == (8, 2)
    assert made.sigmas[LATENTS].shape == (8, 3)
    assert images.shape == (8, 1, 3, 32, 48)
    assert images.dtype == torch.uint8
    assert len({id(condition) for condition in batch.conditions}) == 4  # one for each group
    assert [*zip(batch.group.tolist(), batch.sample.tolist())] == [(g, s) for g in range(4) for s in range(2)]
    assert len(images.flatten(1).unique(dim=0)) == 8
    schedule = rollout.family.schedules(4)[LATENTS]
    for row, request in enumerate(rollout.requests):
        start = request.window.start
        assert torch.equal(made.sigmas[LATENTS][row], schedule.sigmas[start : start + 3])
        assert torch.equal(made.timesteps[LATENTS][row], schedule.timesteps[start : start + 2])


def test_steps_before_the_window_are_the_stock_pipelines(rollout):
    """Expected: diffusers' own scheduler, stopped after the second of four steps."""
    requests = [replace(r, window=Window(2, 1)) for r in rollout.requests]
    made = rollout.generate(requests)
    stock = rollout.family.load_pipeline(torch.float32)
    stock.transformer = rollout.transformer
    driver = rollout.family.driver("diffusers")
    inputs = DenoisingInputs(
        {LATENTS: drawn_noise(rollout, requests)[0]},
        stack_conditions(made.conditions),
        stack_conditions(made.negative),
        rollout.family.guidance(rollout.config.sampling),
        num_steps=4,
    )
    after = {}
    stock(
        **driver.embeddings(inputs),
        **driver.settings(inputs),
        latents=inputs.initial[LATENTS],
        callback_on_step_end=lambda _, i, t, kwargs: after.update({i: kwargs["latents"].clone()}) or {},
    )
    assert torch.equal(made.trajectory.latents[LATENTS][:, 0], after[1])
    assert not torch.equal(made.trajectory.latents[LATENTS][:, 1], after[2])


def test_a_record_can_be_computed_again(rollout, batch):
    """Velocity, transition and log-probability from the recorded tensors alone, as the actor does it:
    bitwise.
    """
    sampling, made = rollout.config.sampling, batch.trajectory
    latents, sigmas, timesteps = made.latents[LATENTS], made.sigmas[LATENTS], made.timesteps[LATENTS]
    for i in range(2):
        scored = transition(
            sampling.transition,
            rollout.velocity(batch, latents[:, i], timesteps[:, i]),
            latents[:, i],
            sigmas[:, i],
            sigmas[:, i + 1],
            noise_level=sampling.noise_level,
            sigma_max=made.sigma_max[LATENTS],
            next_sample=latents[:, i + 1],
        )
        assert torch.equal(scored.log_prob, made.log_probs[:, i])
        # the drawn noise is what lies between mean and next sample
        drawn = (latents[:, i + 1] - scored.mean) / scored.std
        torch.testing.assert_close(
            drawn, drawn_noise(rollout, rollout.requests)[1][:, i], rtol=1e-4, atol=1e-4
        )


def test_image_is_the_end_of_the_trajectory(rollout):
    requests = [replace(r, window=Window(0, 2)) for r in rollout.requests]
    made = rollout.generate(requests)
    schedule = rollout.family.schedules(4)[LATENTS]
    latents = made.trajectory.latents[LATENTS][:, -1]
    for i in (2, 3):  # the ODE steps after the window
        velocity = rollout.velocity(made, latents, schedule.timesteps[i].expand(8))
        latents = transition("ode", velocity, latents, schedule.sigmas[i], schedule.sigmas[i + 1]).next_sample
    assert torch.equal(latents, made.clean[LATENTS])
    decoded = rollout.family.decode(rollout.engine._pipeline, {LATENTS: latents})
    assert torch.equal(decoded.frames, made.media.frames)


def test_samples_do_not_depend_on_their_neighbours(rollout, batch):
    """7 samples padded to 8, in another order, with windows of their own: each as in the whole batch,
    bitwise.
    """
    order = [6, 0, 3, 7, 2, 5, 1]
    made = rollout.generate([rollout.requests[i] for i in order])
    assert len(made) == 7
    assert same(made, batch[order])
    alone = rollout.generate([rollout.requests[4]])
    assert len(alone) == 1
    assert same(alone, batch[[4]])


def test_each_sample_may_have_a_window_of_its_own(rollout):
    windows = [Window(i % 2, 2) for i in range(8)]
    requests = [replace(r, window=w) for r, w in zip(rollout.requests, windows)]
    together = rollout.generate(requests)
    assert len(together.trajectory.sigmas[LATENTS][:, 0].unique()) == 2
    for i in (0, 1, 7):
        assert same(rollout.generate([requests[i]]), together[[i]])


def test_images_follow_the_adapter(rollout, tiny_model, tiny_prompts, tmp_path):
    """A synced optimizer step changes the images of a fixed seed; the old weights bring the old ones back,
    bitwise.
    """
    config = rollout.config
    with one_rank_group():
        actor = FSDPActor(config, rollout.family, ALONE, CPU)
        receipts = [deliver_lora(rollout.engine, collect_lora(actor, torch.float32), version=1)]
        old = rollout.generate()
        saved = {name: tensor.clone() for name, tensor in actor.weights()}
        for parameter in actor._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        actor.apply_gradients()
        receipts.append(deliver_lora(rollout.engine, collect_lora(actor, torch.float32), version=2))
        new = rollout.generate()
    receipts.append(rollout.engine.load_lora(saved, version=3))
    again = rollout.generate()
    fill_adapter(rollout.transformer, seed=1)  # as the other tests expect it
    assert [r.version for r in receipts] == [1, 2, 3]
    assert receipts[0].checksum == receipts[2].checksum != receipts[1].checksum
    assert all(not torch.equal(a, b) for a, b in zip(old.media.frames, new.media.frames))
    assert same(old, again)
    assert [set(b.version.tolist()) for b in (old, new, again)] == [{1}, {2}, {3}]


def test_sleep_and_wake_change_nothing(rollout, batch):
    rollout.engine.sleep()
    for use in (
        rollout.generate,
        lambda: rollout.engine.encode(Prompt("0", "a cat")),
        lambda: rollout.engine.load_lora({}, 1),
    ):
        with pytest.raises(RuntimeError, match="the engine is asleep"):
            use()
    rollout.engine.wake()
    assert same(rollout.generate(), batch)

    fill_adapter(rollout.transformer, seed=2)  # unlike the base, it is copied to the host at every sleep
    other = rollout.generate()
    rollout.engine.sleep()
    rollout.engine.wake()
    assert same(rollout.generate(), other)
    fill_adapter(rollout.transformer, seed=1)  # as the other tests expect it


def test_engine_has_its_own_dtype(rollout, tiny_model, tiny_prompts, tmp_path):
    """bf16: the latents are kept and the log-probabilities computed in fp32, the adapter is bf16."""
    config = make_config(
        tiny_model, tiny_prompts, tmp_path, "rollout.dtype=bfloat16", "rollout.micro_batch_size=8"
    )
    made = Rollout(config)
    assert {p.dtype for p in lora_parameters(made.transformer).values()} == {torch.bfloat16}
    batch = made.generate()
    latents = batch.trajectory.latents[LATENTS]
    assert batch.conditions[0]["embeds"].dtype == torch.bfloat16
    assert latents.dtype == batch.trajectory.log_probs.dtype == torch.float32
    assert not torch.equal(latents, latents.bfloat16().float())
