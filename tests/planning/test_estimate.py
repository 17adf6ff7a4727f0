"""Memory of a plan against memory that was measured: of tensors made here for the tiny recipe, of a GPU at
full size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from omnirl_hpc.actor.fsdp import FSDPActor, local
from omnirl_hpc.algorithms.algorithm import TrainingPoint
from omnirl_hpc.config.load import load_config
from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError
from omnirl_hpc.metrics.phases import PhaseTimer
from omnirl_hpc.models.lora import lora_parameters
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.planning.estimate import Estimate, estimate
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.sampling.streams import LATENTS
from tests.helpers import ALONE, CPU, one_rank_group
from tests.planning.cases import COMPILED, MEASURED, MEASURED_TEXT, full_size

GIB = 2**30
GB = 1e9
TEXT = 256


def tiny_recipe(tiny_model, tiny_prompts, tmp_path, *overrides: str) -> Config:
    paths = (f"run_dir={tmp_path}", f"model.path={tiny_model}", f"data.prompts={tiny_prompts}")
    return load_config(["recipe=flowgrpo_tiny", *paths, *overrides]).config


@pytest.fixture
def tiny(tiny_model, tiny_prompts, tmp_path) -> Config:
    return tiny_recipe(tiny_model, tiny_prompts, tmp_path)


def storage_bytes(tensors) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def about(expected: float) -> object:
    return pytest.approx(expected, rel=0.15)


def parts(needed: dict[str, float], *names: str) -> float:
    return sum(needed[name] for name in names)


def test_actor_of_the_tiny_recipe(tiny):
    needed = estimate(tiny, ALONE, TEXT)
    with one_rank_group():
        actor = FSDPActor(tiny, QwenImage(tiny.model), ALONE, CPU)
        trained = actor._parameters.values()
        base = [p for p in actor._transformer.parameters() if not p.requires_grad]
        assert needed.actor["actor: base weights"] == about(storage_bytes(map(local, base)))
        actor.velocity(training_point(tiny), CURRENT)[LATENTS].sum().backward()
        gradients = [
            p.grad for p in trained if p.grad is not None
        ]  # the text branch of the last block has none
        made = map(local, [*trained, *gradients, *actor.optimizer_state().values()])
        assert parts(needed.actor, "actor: LoRA", "actor: Adam", "actor: gradients") == about(
            storage_bytes(made)
        )
        actor.sleep()
        copies = ("copy of actor: base weights", "copy of actor: LoRA", "copy of actor: Adam")
        assert parts(needed.host, *copies) == about(actor._pinned.host_bytes())


def test_actor_of_the_tiny_recipe_that_trains_all_weights(tiny_model, tiny_prompts, tmp_path):
    config = tiny_recipe(
        tiny_model,
        tiny_prompts,
        tmp_path,
        "actor.train=full",
        "actor.dtype=bfloat16",
        "rollout.dtype=bfloat16",
    )
    needed = estimate(config, ALONE, TEXT)
    with one_rank_group():
        actor = FSDPActor(config, QwenImage(config.model), ALONE, CPU)
        trained = actor._parameters.values()
        assert needed.actor["actor: activations"] == about(saved_bytes(actor, training_point(config)))
        actor.velocity(training_point(config), CURRENT)[LATENTS].sum().backward()
        gradients = [p.grad for p in trained if p.grad is not None]
        assert parts(needed.actor, "actor: weights", "actor: Adam") == about(
            storage_bytes(map(local, actor.sharded_state().values()))
        )
        assert needed.actor["actor: gradients"] == about(storage_bytes(map(local, gradients)))
        assert not any(
            "base" in name or "LoRA" in name for name in needed.actor | needed.rollout | needed.host
        )
        actor.sleep()
        assert parts(needed.host, "copy of actor: weights", "copy of actor: Adam") == about(
            actor._pinned.host_bytes()
        )


def test_all_weights_of_the_full_model():
    """20.43 B parameters: 12 bytes of each with Adam's moments, 4 of the gradient, over 4 ranks; a copy in
    both residencies.
    """
    whole = 20.43e9
    for mode, copies in (("swap", 5), ("resident", 2)):
        needed = estimate(*full_size("actor.train=full", f"residency={mode}", ranks=4))
        assert sum(
            needed.actor.get(n, 0) + needed.always.get(n, 0) for n in ("actor: weights", "actor: Adam")
        ) == about(whole * 3)
        assert needed.actor["actor: gradients"] == about(whole)
        assert (
            sum(name.startswith("copy of") for name in needed.host) == copies
        )  # resident: of the actor's alone
        assert parts(needed.host, "copy of actor: weights", "copy of actor: Adam") == about(whole * 3)
    assert estimate(*full_size("actor.train=full", "checkpoint.keep=1")).disk["checkpoints"] == about(
        2 * 12 * whole
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cfg", ["sequential", "batched"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_the_tiny_recipe(tiny_model, tiny_prompts, tmp_path, checkpointing, cfg, dtype):
    overrides = (
        f"actor.activation_checkpointing={checkpointing}",
        f"actor.cfg={cfg}",
        f"actor.dtype={dtype}",
    )
    config = tiny_recipe(tiny_model, tiny_prompts, tmp_path, *overrides, f"rollout.dtype={dtype}")
    needed = estimate(config, ALONE, TEXT).actor
    with one_rank_group():
        actor = FSDPActor(config, QwenImage(config.model), ALONE, CPU)
        saved = saved_bytes(actor, training_point(config))
    assert needed["actor: inputs of blocks" if checkpointing else "actor: activations"] == about(saved)


def saved_bytes(actor: FSDPActor, point: TrainingPoint) -> int:
    """What autograd keeps of a forward pass, weights apart, while nothing is recomputed."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        weights = {parameter.untyped_storage()._cdata for parameter in full_parameters(actor._transformer)}
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actor.velocity(point, CURRENT)
    return sum(storage.nbytes() for storage in kept.values())


def full_parameters(transformer: nn.Module) -> list[Tensor]:
    """As FSDP has gathered them at the moment."""
    return [local(parameter) for parameter in transformer.parameters()]


def training_point(config: Config) -> TrainingPoint:
    """A micro-batch of the recipe."""
    size, shape = config.actor.micro_batch_size, QwenImage(config.model).stream_shapes()[LATENTS]
    mask = torch.arange(TEXT)[None].expand(size, TEXT) < TEXT - 1
    text = {"embeds": torch.zeros(size, TEXT, 32), "mask": mask}
    ones = torch.ones(size)
    return TrainingPoint({LATENTS: torch.zeros(size, *shape)}, {LATENTS: ones * 500}, text, text, ones, ones)


def test_engine_of_the_tiny_recipe(tiny):
    needed = estimate(tiny, ALONE, TEXT)
    engine = DiffusersEngine(tiny, QwenImage(tiny.model), CPU, PhaseTimer(CPU))
    pipeline = engine._pipeline
    adapter = list(lora_parameters(pipeline.transformer).values())
    base = [p for name, p in pipeline.transformer.named_parameters() if ".lora_" not in name]
    assert needed.rollout["engine: transformer"] == about(storage_bytes(base))
    assert needed.rollout["engine: text_encoder"] == about(storage_bytes(pipeline.text_encoder.parameters()))
    assert needed.rollout["engine: vae"] == about(storage_bytes(pipeline.vae.parameters()))
    assert needed.rollout["engine: LoRA"] == about(storage_bytes(adapter))
    engine.sleep()
    copies = [name for name in needed.host if name.startswith("copy of engine: ")]
    assert parts(needed.host, *copies) == about(engine._pinned.host_bytes())


def without_text_encoder(needed: Estimate) -> tuple[float, float, float]:
    """GiB on the GPU in rollout and in the actor's turn, and on the host: the measured checkpoint had a tiny
    text encoder.

    Torch's count, which these are compared with, leaves out the CUDA context; the host's was made with few
    prompts.
    """
    always = sum(needed.always.values()) - needed.always["CUDA and NCCL"]
    rollout = always + sum(needed.rollout.values()) - needed.rollout["engine: text_encoder"]
    host = (
        needed.node_bytes(1) - needed.host["copy of engine: text_encoder"] - needed.host["prompt embeddings"]
    )
    return rollout / GIB, (always + sum(needed.actor.values())) / GIB, host / GIB


def test_one_h200_as_measured():
    """The working memory in planning/measured.py comes from these figures."""
    config, layout = full_size(*MEASURED, *COMPILED)
    rollout, actor, host = without_text_encoder(estimate(config, layout, MEASURED_TEXT))
    assert rollout == pytest.approx(56.3, rel=0.02)
    assert actor == pytest.approx(63.7, rel=0.02)
    assert host == pytest.approx(90.1, rel=0.02)


def test_two_h200_as_measured():
    """Half of the actor's weights on each."""
    config, layout = full_size("data.prompts_per_step=4", *COMPILED, ranks=2)
    rollout, actor, host = without_text_encoder(estimate(config, layout, MEASURED_TEXT))
    assert rollout == pytest.approx(56.3, rel=0.02)
    assert actor == pytest.approx(42.2, rel=0.03)
    assert host == pytest.approx(66.2, rel=0.05)


def test_eight_ranks_hold_460_gb_of_the_engine():
    """DESIGN's reason to plan by node: 8 x 57.5 GB of page-locked copies."""
    needed = estimate(*full_size(ranks=8))
    assert 8 * sum(size for name, size in needed.host.items() if name.startswith("copy of engine")) == about(
        460 * GB
    )
    assert needed.node_bytes(8) == 8 * needed.node_bytes(1) > 460 * GB


def test_resident_keeps_both_on_the_gpu_and_copies_only_what_changes():
    swap, resident = (
        estimate(*full_size(f"residency={mode}", "rollout.lora=adapter")) for mode in ("swap", "resident")
    )
    assert resident.gpu_bytes > swap.gpu_bytes + 40 * GB  # the actor's base
    copies = {name for name in resident.host if name.startswith("copy of")}
    assert copies == {"copy of actor: LoRA", "copy of actor: Adam"}


def test_merged_lora_keeps_a_clean_copy_even_if_resident():
    needed = estimate(*full_size("residency=resident", "rollout.lora=merged"))
    assert needed.host["copy of engine: transformer"] > 40 * GB
    assert not any("engine: LoRA" in name for name in (needed.always | needed.rollout))


def test_what_stays_awake_is_not_copied():
    needed = estimate(*full_size("rollout.awake=[text_encoder]"))
    assert "engine: text_encoder" in needed.always and "engine: text_encoder" not in needed.rollout
    assert "copy of engine: text_encoder" not in needed.host
    with pytest.raises(
        ConfigError, match="rollout.awake names encoder; the engine has transformer, text_encoder, vae"
    ):
        estimate(*full_size("rollout.awake=[encoder]"))


def test_sharding_divides_the_actors_weights():
    one, four = (estimate(*full_size(ranks=ranks)).actor for ranks in (1, 4))
    for part in ("base weights", "LoRA", "Adam", "gradients"):
        assert four[f"actor: {part}"] == one[f"actor: {part}"] / 4
    copies = estimate(*full_size("actor.shard_size=1", ranks=4)).actor
    assert copies["actor: base weights"] == one["actor: base weights"]


def test_tensor_parallelism_splits_all_but_modulation():
    """6.8 of the 20.4 B parameters are modulation."""
    one, two = (
        estimate(*full_size(f"rollout.tensor_parallel_size={size}", ranks=2)).rollout["engine: transformer"]
        for size in (1, 2)
    )
    assert one > two == pytest.approx(2 * (6.8e9 + 13.6e9 / 2), rel=0.01)


def test_a_running_mean_is_one_more_copy_of_the_adapter():
    without, with_mean = (
        estimate(*full_size(*overrides, ranks=2)) for overrides in ((), ("actor.ema_decay=0.99",))
    )
    copy = 424.7e6 * 4
    assert sum(with_mean.actor.values()) - sum(without.actor.values()) == pytest.approx(copy / 2, rel=1e-3)
    assert with_mean.node_bytes(2) - without.node_bytes(2) == pytest.approx(copy, rel=1e-3)
    assert with_mean.disk["checkpoints"] - without.disk["checkpoints"] == pytest.approx(
        3 * copy, rel=1e-3
    )  # of keep=2 and one more


def test_disk_is_one_checkpoint_more_than_are_kept():
    needed = estimate(*full_size("checkpoint.keep=3"))
    assert needed.disk["checkpoints"] == pytest.approx(
        4 * 424.7e6 * 3 * 4, rel=1e-3
    )  # adapter and two moments, fp32


def test_auto_is_to_be_resolved_first():
    with pytest.raises(ValueError, match="residency=auto"):
        estimate(*full_size("residency=auto"))
