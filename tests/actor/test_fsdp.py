"""FSDP2 over the tiny transformer: whatever the sharding, the gradients of plain autograd."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist

from omnirl_hpc.actor.fsdp import FSDPActor
from omnirl_hpc.actor.update import accumulate_gradients, apply_gradients, recompute_old
from omnirl_hpc.algorithms import FlowGRPO
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import NonFiniteError
from omnirl_hpc.layout import make_layout
from omnirl_hpc.metrics.accumulator import Accumulator
from omnirl_hpc.models.lora import base_tensors, lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.models.spec import Guidance, Numerics
from omnirl_hpc.policies import CURRENT, REFERENCE
from omnirl_hpc.sampling.streams import LATENTS
from tests.actor.cases import SAMPLES, gradients, largest_difference, make_actor, make_points, plain_gradients
from tests.helpers import CPU, go_on, make_config, one_rank_group, run_ranks

ALL = range(SAMPLES)


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank_group():
        yield


@pytest.fixture
def configured(tiny_model, tiny_prompts, tmp_path):
    return lambda *overrides: make_config(tiny_model, tiny_prompts, tmp_path, *overrides)


def test_gradients_are_plain_autograds(configured):
    config = configured()
    made = gradients(make_actor(config), config, make_points(config, ALL, micro_batch=4))
    expected = plain_gradients(config, make_points(config, ALL, micro_batch=4))
    assert len(made) > 40  # of 48: the last block's text output, and with it some text targets, are unused
    assert largest_difference(made, expected) < 1e-6


@pytest.mark.parametrize("scale, tolerance", [(1.0, 1e-6), (4.0, 4e-6)])
def test_accumulation_equals_one_big_batch(configured, scale, tolerance):
    """Micro-batches of 1, 2 and 4, each over the 2 steps of the window.

    Kernels round differently for other batch sizes (here by 4e-7), and guidance multiplies that by its scale.
    """
    config = configured(f"sampling.true_cfg_scale={scale}")
    actor = make_actor(config)
    whole = gradients(actor, config, make_points(config, ALL, micro_batch=4))
    for size in (1, 2):
        assert (
            largest_difference(gradients(actor, config, make_points(config, ALL, micro_batch=size)), whole)
            < tolerance
        )


@pytest.mark.parametrize("setting", ["actor.activation_checkpointing=true", "actor.cfg=batched"])
def test_memory_settings_change_no_gradient(configured, setting):
    base, other = configured("algorithm.kl_coef=0.1"), configured("algorithm.kl_coef=0.1", setting)
    expected = gradients(make_actor(base), base, make_points(base, ALL, micro_batch=2))
    made = gradients(make_actor(other), other, make_points(other, ALL, micro_batch=2))
    assert largest_difference(made, expected) < (1e-12 if "checkpointing" in setting else 1e-5)


def test_batched_guidance_is_one_forward_pass(configured):
    for cfg, calls in (("sequential", [4, 4]), ("batched", [8])):
        actor, seen = make_actor(configured(f"actor.cfg={cfg}")), []
        actor._transformer.register_forward_pre_hook(
            lambda _, __, kwargs, seen=seen: seen.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        actor.velocity(make_points(configured(), ALL, micro_batch=4)[0], CURRENT)
        assert seen == calls


def test_sample_of_weight_zero_contributes_nothing(configured):
    """Bitwise the same gradient whatever its reward and its latents, and that of the other samples alone up
    to rounding.
    """
    config = configured("algorithm.kl_coef=0.1", "sampling.true_cfg_scale=1.0")
    actor, weights = make_actor(config), [0.25, 0.25, 0.0, 0.5]
    points = make_points(config, ALL, 4, weights)
    first = gradients(actor, config, points)
    for point in points:
        point.advantages[2] = 1e6
        point.latents[LATENTS][2] += 1
    assert largest_difference(gradients(actor, config, points), first) == 0
    others = gradients(actor, config, make_points(config, [0, 1, 3], 3, weights))
    assert largest_difference(others, first) < 1e-6


def test_reference_is_the_base_model(configured):
    """Bitwise, and the adapter is on again afterwards; with gradients through both, and after an error."""
    config = configured()
    actor, point = make_actor(config), make_points(config, ALL, micro_batch=4)[0]
    before = actor.velocity(point, CURRENT)[LATENTS]
    reference = actor.velocity(point, REFERENCE)[LATENTS].detach()
    after = actor.velocity(point, CURRENT)[LATENTS]
    family = QwenImage(config.model)
    with torch.no_grad():
        expected = family.velocity(
            family.load_transformer(torch.float32),
            point.latents,
            point.timesteps,
            point.conditions,
            point.negative,
            Guidance({"text": 4.0}),
            Numerics(),
        )[LATENTS]
    assert torch.equal(reference, expected)
    assert torch.equal(before, after)
    assert float((before - reference).detach().abs().max()) > 1e-3
    after.sum().backward()
    assert sum(p.grad is not None for p in actor._parameters.values()) > 40

    with pytest.raises(ValueError, match="the actor holds no policy 'teacher'; it holds current"):
        actor.velocity(point, "teacher")
    with pytest.raises(AttributeError):
        actor.velocity(None, REFERENCE)
    assert torch.equal(actor.velocity(point, CURRENT)[LATENTS], before)


def test_an_update_makes_better_samples_likelier(configured):
    """The sign of it all: the sum of weight x advantage x change of log-probability is positive, and ratios
    are reported.
    """
    config = configured("actor.optimizer.lr=1e-3", "algorithm.clip_range=0.2")
    actor, algorithm, metrics = make_actor(config), FlowGRPO(config), Accumulator(torch.device("cpu"))
    points = make_points(config, ALL, micro_batch=2)
    old = recompute_old(actor, algorithm, points, metrics, go_on)
    accumulate_gradients(actor, algorithm, points, metrics, go_on, first=True)
    apply_gradients(actor, metrics)
    reported = metrics.reduce()
    assert reported["ratio/max_abs_log"] == 0  # the same policy, the same kernels
    assert reported["ratio/mean"] == pytest.approx(1)
    gain = 0.0
    with torch.no_grad():
        for point, before in zip(points, old):
            change = algorithm.log_prob(point, actor.velocity(point, CURRENT)) - before.log_prob
            gain += float((point.weights * point.advantages * change).sum())
    assert gain > 1e-6


def test_kl_to_the_reference_has_plain_autograds_gradient(configured):
    """The reference pass between forward and backward of the policy switches adapters: the gradient must not
    notice.
    """
    config = configured("algorithm.kl_coef=10.0", "actor.activation_checkpointing=true")
    made = gradients(make_actor(config), config, make_points(config, ALL, micro_batch=4))
    assert largest_difference(made, plain_gradients(config, make_points(config, ALL, micro_batch=4))) < 1e-6
    without = configured()
    assert largest_difference(made, plain_gradients(without, make_points(without, ALL, micro_batch=4))) > 1e-2


def test_gradients_that_are_not_finite_stop_the_run(configured):
    config = configured()
    actor = make_actor(config)
    before = dict(actor.weights())
    before = {name: tensor.clone() for name, tensor in before.items()}
    for value in (math.nan, math.inf):
        for parameter in actor._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        list(actor._parameters.values())[3].grad.to_local()[0, 0] = value
        with pytest.raises(
            NonFiniteError, match="the gradient norm is (nan|inf): the update was not applied"
        ):
            actor.apply_gradients()
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.weights())


def test_gradients_are_clipped_cleared_and_reported(configured):
    """All gradients 1: the norm is the square root of the number of parameters."""
    config = configured(
        "actor.optimizer.max_grad_norm=1e-12", "actor.optimizer.eps=1.0", "actor.optimizer.warmup_updates=2"
    )
    actor = make_actor(config)
    before = {name: tensor.clone() for name, tensor in actor.weights()}
    count = sum(p.numel() for p in actor._parameters.values())
    rates = []
    for _ in range(3):
        for parameter in actor._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        norm, lr = actor.apply_gradients()
        assert norm == pytest.approx(math.sqrt(count), rel=1e-5)
        assert all(p.grad is None for p in actor._parameters.values())
        rates.append(lr)
    assert rates == pytest.approx([0.005, 0.01, 0.01])
    # eps = 1 and clipped gradients of 1e-14: Adam takes no step, and what is left is the decay, 1 - lr * 1e-4
    # a step
    decay = math.prod(1 - lr * 1e-4 for lr in rates)
    for name, tensor in actor.weights():
        torch.testing.assert_close(tensor, before[name] * decay, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("giving_up", ["rollback", "sleep"])
def test_gradients_of_a_step_that_was_given_up_do_not_reach_the_next(configured, giving_up):
    """A stop between two micro-batches leaves half an update's gradients behind."""
    config = configured()
    actor, points = make_actor(config), make_points(config, ALL, micro_batch=2)
    actor.keep()
    expected = gradients(actor, config, points)
    accumulate_gradients(actor, FlowGRPO(config), points[:1], Accumulator(CPU), go_on, first=True)
    assert list(actor.gradients())
    getattr(actor, giving_up)()
    if giving_up == "sleep":
        actor.wake()
    assert list(actor.gradients()) == []
    assert largest_difference(gradients(actor, config, points), expected) == 0


def test_a_rolled_back_update_was_never_made(configured):
    """What is trained, the optimizer's state, the learning rate and where its schedule stands."""
    config = configured("actor.optimizer.warmup_updates=8")
    actor = make_actor(config)

    def learn() -> float:
        for parameter in actor._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        return actor.apply_gradients()[1]

    def state() -> dict[str, torch.Tensor]:
        whole = dict(actor.weights()) | dict(actor.full_optimizer_state())
        return {name: tensor.clone() for name, tensor in whole.items()}

    assert learn() == pytest.approx(0.01 / 8)
    actor.keep()
    kept = state()
    assert [learn(), learn()] == pytest.approx([0.01 * 2 / 8, 0.01 * 3 / 8])
    assert all(not torch.equal(tensor, kept[name]) for name, tensor in state().items())
    actor.rollback()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state().items())
    assert learn() == pytest.approx(0.01 * 2 / 8)
    after = state()
    actor.rollback()  # as often as one likes
    assert learn() == pytest.approx(0.01 * 2 / 8)
    assert all(torch.equal(tensor, after[name]) for name, tensor in state().items())


def test_a_learning_rate_schedule_goes_on_in_another_actor(configured):
    """As in a run that is resumed: the next update is made with the rate that comes next."""
    config = configured("actor.optimizer.warmup_updates=8")
    first, second = make_actor(config), make_actor(config)
    for _ in range(3):
        for parameter in first._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        first.apply_gradients()
    second.load(CURRENT, dict(first.weights()))
    for name, tensor in second.sharded_state().items():
        tensor.copy_(first.sharded_state()[name])
    second.load_scheduler_state(json.loads(json.dumps(first.scheduler_state())))
    for actor in (first, second):
        for parameter in actor._parameters.values():
            parameter.grad = torch.ones_like(parameter)
        assert actor.apply_gradients()[1] == pytest.approx(0.01 * 4 / 8)
    after = dict(second.weights())
    assert all(torch.equal(tensor, after[name]) for name, tensor in first.weights())


def on_two_ranks(configs: dict[str, Config]) -> dict[str, dict]:
    """What rank r makes of its half of the samples, by the name of the configuration."""
    results = {}
    rank = dist.get_rank()
    rows = [rank, rank + 2]
    for name, config in configs.items():
        layout = make_layout(config, rank, dist.get_world_size())
        actor = make_actor(config, layout)
        points = make_points(config, rows, micro_batch=2)
        some = actor._parameters["transformer_blocks.0.attn.to_q.lora_A.weight"]
        local = some.to_local().numel() / some.numel()
        result = {
            "gradients": gradients(actor, config, points),
            "local": local,
            "before": dict(actor.weights()),
        }
        result["before"] = {k: v.clone() for k, v in result["before"].items()}
        result["base"] = {
            k: v.full_tensor() for k, v in base_tensors(actor._transformer.state_dict()).items()
        }
        algorithm, metrics = FlowGRPO(config), Accumulator(torch.device("cpu"))
        accumulate_gradients(actor, algorithm, points, metrics, go_on, first=True)
        apply_gradients(actor, metrics)
        result |= {"metrics": metrics.reduce(), "after": dict(actor.weights())}
        result["dtypes"] = {p.dtype for p in lora_parameters(actor._transformer).values()}
        results[name] = result
    return results


def test_two_ranks_give_the_gradients_of_one(configured):
    """Fully sharded, replicated (mesh 2 x 1), with checkpointing and KL; and a bf16 base under fp32 adapters
    trains.

    Expected: plain autograd on the micro-batches of both ranks, one after the other.
    """
    configs = {
        "sharded": configured(),
        "replicated": configured("actor.shard_size=1"),
        "kl": configured(
            "algorithm.kl_coef=10.0", "actor.activation_checkpointing=true", "actor.cfg=batched"
        ),
        "bf16": configured("actor.dtype=bfloat16", "rollout.dtype=bfloat16"),
    }
    ranks = run_ranks(2, on_two_ranks, configs)
    for name in ("sharded", "replicated", "kl"):
        expected = plain_gradients(configs[name], make_points(configs[name], [0, 2, 1, 3], micro_batch=2))
        tolerance = 1e-5 if name == "kl" else 1e-6  # batched guidance rounds differently
        for rank in ranks:
            assert largest_difference(rank[name]["gradients"], expected) < tolerance, name

    single = FSDPActor(
        configs["bf16"],
        QwenImage(configs["bf16"].model),
        make_layout(configs["bf16"], 0, 1),
        torch.device("cpu"),
    )
    for rank in ranks:
        assert {name: result["local"] for name, result in rank.items()} == {
            "sharded": 0.5,
            "replicated": 1,
            "kl": 0.5,
            "bf16": 0.5,
        }
        assert rank["bf16"]["dtypes"] == {torch.float32}
        assert rank["bf16"]["metrics"]["grad_norm"] > 0
        before, after = rank["bf16"]["before"], rank["bf16"]["after"]
        assert before.keys() == dict(single.weights()).keys()
        moved = {k for k in before if not torch.equal(before[k], after[k])}
        assert len(moved) > 40
        # fp32 values, not bf16 ones in fp32 clothes
        assert all(not torch.equal(after[k], after[k].bfloat16().float()) for k in moved)
        # both ranks have the whole and the same state and metrics
        for name in configs:
            base = (
                QwenImage(configs[name].model)
                .load_transformer(getattr(torch, configs[name].actor.dtype))
                .state_dict()
            )
            assert base.keys() == rank[name]["base"].keys()
            assert all(torch.equal(rank[name]["base"][k], tensor) for k, tensor in base.items())
            assert rank[name]["metrics"] == ranks[0][name]["metrics"]
            assert all(
                torch.equal(rank[name]["after"][k], ranks[0][name]["after"][k]) for k in rank[name]["after"]
            )
