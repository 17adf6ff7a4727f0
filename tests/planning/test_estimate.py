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
from omnirl_hpc.planning.estimate import Estimate, estimate, find_shape, samples_of_rank
from omnirl_hpc.planning.measured import (
    ACTOR_WORKING_VECTORS,
    CUDA_HOST_BYTES,
    DECODE_VALUES_PER_PIXEL,
    PROCESS_BYTES,
)
from omnirl_hpc.policies import CURRENT
from omnirl_hpc.rollout.diffusers_engine import DiffusersEngine
from omnirl_hpc.sampling.streams import LATENTS
from tests.helpers import ALONE, CPU, one_rank_group
from tests.planning.cases import COMPILED, MEASURED, MEASURED_TEXT, full_size

GIB = 2**30
GB = 1e9
TEXT = 256

IMAGE, TOKENS, CHANNELS, WIDTH, TEXT_CHANNELS = 512 * 512, 1024, 64, 3072, 3584  # of the main recipe
BLOCK, OUTSIDE = 339_831_296, 40_523_328  # parameters of one of the 60 blocks, and of what is around them
ADAPTER = 424_673_280  # parameters of LoRA at rank 64


def tiny_recipe(tiny_model, tiny_prompts, tmp_path, *overrides: str) -> Config:
    paths = (f"run_dir={tmp_path}", f"model.path={tiny_model}", f"data.prompts={tiny_prompts}")
    return load_config(["recipe=flowgrpo_tiny", *paths, *overrides]).config


@pytest.fixture
def tiny(tiny_model, tiny_prompts, tmp_path) -> Config:
    return tiny_recipe(tiny_model, tiny_prompts, tmp_path)


def storage_bytes(tensors) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def nearly(expected: float, but: float = 1e-3) -> object:
    """But for what a plan leaves out: scalars, such as the steps of the optimizer, unless told."""
    return pytest.approx(expected, rel=but)


def parts(needed: dict[str, float], *names: str) -> float:
    return sum(needed[name] for name in names)


def test_actor_of_the_tiny_recipe(tiny):
    needed = estimate(tiny, ALONE, TEXT)
    with one_rank_group():
        actor = FSDPActor(tiny, QwenImage(tiny.model), ALONE, CPU)
        trained = actor._parameters.values()
        base = [p for p in actor.transformer.parameters() if not p.requires_grad]
        assert needed.actor["actor: base weights"] == storage_bytes(map(local, base))
        assert needed.actor["actor: LoRA"] == storage_bytes(map(local, trained))
        assert needed.actor["actor: Adam"] == nearly(
            storage_bytes(map(local, actor.optimizer_state().values()))
        )
        actor.velocity(training_point(tiny), CURRENT)[LATENTS].sum().backward()
        made = [p.grad if p.grad is not None else p for p in trained]  # the last block's text output has none
        assert needed.actor["actor: gradients"] == storage_bytes(map(local, made))
        actor.sleep()
        copies = ("copy of actor: base weights", "copy of actor: LoRA", "copy of actor: Adam")
        assert parts(needed.host, *copies) == nearly(actor._pinned.host_bytes())


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
        saved = saved_bytes(actor, training_point(config))
        assert needed.actor["actor: activations"] == nearly(saved, but=0.02)
        actor.velocity(training_point(config), CURRENT)[LATENTS].sum().backward()
        assert needed.actor["actor: weights"] == storage_bytes(map(local, trained))
        assert needed.actor["actor: Adam"] == nearly(
            storage_bytes(map(local, actor.optimizer_state().values()))
        )
        made = [p.grad if p.grad is not None else p for p in trained]  # the last block's text output has none
        assert needed.actor["actor: gradients"] == storage_bytes(map(local, made))
        assert not any(
            "base" in name or "LoRA" in name for name in needed.actor | needed.rollout | needed.host
        )
        actor.sleep()
        copies = ("copy of actor: weights", "copy of actor: Adam")
        assert parts(needed.host, *copies) == nearly(actor._pinned.host_bytes())


def test_all_weights_of_the_full_model():
    """20.4 B parameters: 12 bytes of each with Adam's moments, 4 of the gradient, over 4 ranks; a copy in
    both residencies.
    """
    whole = 60 * BLOCK + OUTSIDE
    for mode, copies in (("swap", 5), ("resident", 2)):
        needed = estimate(*full_size("actor.train=full", f"residency={mode}", ranks=4))
        assert sum(
            needed.actor.get(n, 0) + needed.always.get(n, 0) for n in ("actor: weights", "actor: Adam")
        ) == nearly(whole * 3)
        assert needed.actor["actor: gradients"] == nearly(whole)
        assert (
            sum(name.startswith("copy of") for name in needed.host) == copies
        )  # resident: of the actor's alone
        assert parts(needed.host, "copy of actor: weights", "copy of actor: Adam") == nearly(whole * 3)
    assert estimate(*full_size("actor.train=full", "checkpoint.keep=1")).disk["checkpoints"] == nearly(
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
    part = "actor: inputs of blocks" if checkpointing else "actor: activations"
    # Beside the blocks' inputs a checkpointed pass keeps some of what is before and after them.
    assert needed[part] == nearly(saved, but=0.05 if checkpointing else 0.02)


def saved_bytes(actor: FSDPActor, point: TrainingPoint) -> int:
    """What autograd keeps of a forward pass, weights apart, while nothing is recomputed."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        weights = {parameter.untyped_storage()._cdata for parameter in full_parameters(actor.transformer)}
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
    return TrainingPoint(
        latents={LATENTS: torch.zeros(size, *shape)},
        timesteps={LATENTS: ones * 500},
        conditions=text,
        negative=text,
        weights=ones,
    )


def test_engine_of_the_tiny_recipe(tiny):
    needed = estimate(tiny, ALONE, TEXT)
    engine = DiffusersEngine(tiny, QwenImage(tiny.model), CPU, PhaseTimer(CPU))
    pipeline = engine._pipeline
    adapter = list(lora_parameters(pipeline.transformer).values())
    base = [p for name, p in pipeline.transformer.named_parameters() if ".lora_" not in name]
    assert needed.rollout["engine: transformer"] == storage_bytes(base)
    assert needed.rollout["engine: text_encoder"] == storage_bytes(pipeline.text_encoder.parameters())
    assert needed.rollout["engine: vae"] == storage_bytes(pipeline.vae.parameters())
    assert needed.rollout["engine: LoRA"] == storage_bytes(adapter)
    engine.sleep()
    copies = [name for name in needed.host if name.startswith("copy of engine: ")]
    assert parts(needed.host, *copies) == nearly(engine._pinned.host_bytes())


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


@pytest.mark.parametrize(
    "overrides, samples, latents, prompts, branches",
    [
        # 32 prompts x 16 over 4 ranks. Latents at the 3 edges of a window of 2 and at the end.
        ((), 128, 4, 8, 2),
        # a replica of two ranks has 16 prompts; each of its ranks trains half of their samples
        (("rollout.tensor_parallel_size=2",), 128, 4, 16, 2),
        (("sampling.true_cfg_scale=1.0",), 128, 4, 8, 1),
        (("sampling.window.size=null", "sampling.window.first=1"), 128, 6, 8, 2),  # steps 1 to 4: 5 edges
        (
            ("sampling.window.size=null", "sampling.window.last=null", "data.samples_per_prompt=8"),  # 0 to 8
            64,
            11,
            8,
            2,
        ),
    ],
)
def test_samples_of_a_step_to_the_byte(overrides, samples, latents, prompts, branches):
    """Latents in fp32; embeddings in bf16, once for each prompt and branch of guidance."""
    config, layout = full_size(*overrides, ranks=4)
    expected = samples * latents * TOKENS * CHANNELS * 4 + prompts * branches * TEXT * TEXT_CHANNELS * 2
    assert estimate(config, layout, TEXT).always["samples of the step"] == expected


@pytest.mark.parametrize("branches, scale", [(2, 4.0), (1, 1.0)])
@pytest.mark.parametrize("cfg", ["sequential", "batched"])
def test_memory_of_the_actors_turn_to_the_byte(branches, scale, cfg):
    """bf16: 2 bytes. 16 samples at once, of one branch or, batched, of both."""
    config, layout = full_size(f"sampling.true_cfg_scale={scale}", f"actor.cfg={cfg}", ranks=4)
    vectors = 16 * (TOKENS + TEXT) * WIDTH * 2
    once = branches if cfg == "batched" else 1
    assert estimate(config, layout, TEXT).actor == {
        "actor: base weights": 2 * (60 * BLOCK + OUTSIDE) / 4,
        "actor: LoRA": 4 * ADAPTER / 4,
        "actor: Adam": 2 * 4 * ADAPTER / 4,
        "actor: gradients": 4 * ADAPTER / 4,
        "actor: gathered blocks": 2 * 2 * BLOCK,
        "actor: inputs of blocks": branches * vectors * 60,
        # counted: 23, and of LoRA in the 6 layers of each stream 64 / 3072 more
        "actor: one block's activations": once * vectors * (23 + 6 * 64 / 3072),
        "actor: working memory": once * vectors * ACTOR_WORKING_VECTORS,
    }
    assert estimate(config, layout, TEXT).rollout["generation"] == DECODE_VALUES_PER_PIXEL * 16 * IMAGE * 2


def test_host_memory_to_the_byte():
    needed = estimate(*full_size("rollout.awake=[vae]", ranks=4), TEXT)
    expected = {
        "prompt embeddings": 4096 * TEXT * TEXT_CHANNELS * 2,
        "copy of engine: transformer": 2 * (60 * BLOCK + OUTSIDE),
        "copy of engine: text_encoder": 2 * 8_292_166_656,
        "copy of actor: base weights": 2 * (60 * BLOCK + OUTSIDE) / 4,
        "copy of actor: LoRA": 4 * ADAPTER / 4,
        "copy of actor: Adam": 2 * 4 * ADAPTER / 4,
        "process": PROCESS_BYTES,
        "CUDA libraries": CUDA_HOST_BYTES,
    }
    assert needed.host == expected
    assert needed.node_bytes(4) == pytest.approx(4 * sum(expected.values()), rel=1e-12)


@pytest.mark.parametrize(
    "steps, every, written",
    [(300, 10, 31), (301, 10, 31), (10, 1, 10), (10, 3, 4), (11, 3, 5), (1, 5, 1), (10, 0, 0)],
)
def test_disk_to_the_byte(steps, every, written):
    """Sample images of every `every`-th step, counted from 0, and of the last one; of 8 samples each."""
    config, layout = full_size(f"steps={steps}", f"logging.samples_every={every}")
    assert estimate(config, layout).disk == {
        "checkpoints": 3 * 3 * 4 * ADAPTER,  # two are kept, one is being written: adapter, two moments, fp32
        "sample images": written * 8 * IMAGE * 1.5,
    }


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
    copies = sum(size for name, size in needed.host.items() if name.startswith("copy of engine"))
    assert 8 * copies == pytest.approx(460 * GB, rel=0.005)
    assert needed.node_bytes(8) > 460 * GB


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


PAIRS = ("algorithm=dpo", "data.prompts_per_step=32", "actor.micro_batch_size=2")


@pytest.mark.parametrize("residency", ["swap", "resident"])
def test_where_no_engine_is_built_none_is_counted(residency):
    """Of learning from a table: the actor's memory, and the encoders that read the table."""
    config, layout = full_size(*PAIRS, f"residency={residency}", ranks=2)
    needed = estimate(config, layout)
    parts = needed.always | needed.rollout | needed.actor | needed.host
    assert not [name for name in parts if "engine" in name or name == "generation"]
    encoders = {name: size for name, size in parts.items() if name.startswith("encoders: ")}
    assert set(encoders) == {"encoders: text_encoder", "encoders: vae"}
    (side, other) = (needed.rollout, {}) if residency == "swap" else (needed.always, needed.rollout)
    assert encoders.items() <= side.items() and other == {}
    with_engine = estimate(*full_size(*PAIRS, f"residency={residency}", "evaluation.every=5", ranks=2))
    generated = with_engine.always | with_engine.rollout
    assert {"engine: transformer", "generation"} <= generated.keys()
    assert with_engine.gpu_bytes > needed.gpu_bytes


def test_pairs_are_two_samples_each_and_are_trained_without_guidance():
    """32 pairs over 2 ranks: 16 pairs, 32 clean latents; in each forward pass the 4 samples of two pairs."""
    config, layout = full_size(*PAIRS, ranks=2)
    shape = find_shape(config)
    assert samples_of_rank(config, layout) == 32
    latents = 32 * shape.latent_values * 4
    text = 16 * shape.condition_values(128) * 2  # of 32 prompts on 2 replicas, bf16
    assert estimate(config, layout, 128).always["samples of the step"] == latents + text
    inputs = 4 * (shape.latent_tokens + 128) * shape.width * 2 * shape.layers
    assert estimate(config, layout, 128).actor["actor: inputs of blocks"] == inputs
