"""Every setting of a training run, typed.

These dataclasses are what Hydra checks a configuration against (`configs/` holds values, this file holds
types, defaults and meaning). Defaults are those of the reference FlowGRPO recipe for Qwen-Image. Torch is not
imported here: a wrong setting must be found in the time it takes to start Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """Which checkpoint, and the size of the images or videos made with it."""

    family: str = "qwen_image"  # a file in configs/, or your own as module:Class
    path: str = MISSING  # a folder in diffusers' layout
    repo: Optional[str] = None  # where `omnirl-hpc prefetch` gets it: ORGANISATION/NAME on the hub
    height: int = 512  # pixels; the family says of what they must be multiples
    width: int = 512
    frames: int = 1  # of a video; 1: images
    fps: float = 24.0  # frames a second of a video


@dataclass
class DataConfig:
    """Prompts, and how many of them make a step."""

    prompts: str = MISSING  # a parquet file with a column `prompt`
    prompts_per_step: int = 32  # groups of a step, over all ranks
    samples_per_prompt: int = 16  # the size of a group
    negative_prompt: str = " "  # where the table has no column negative_prompt
    # Padded widths of prompt embeddings, in tokens. All samples of a step use the smallest width greater than
    # the step's longest prompt, because the width changes kernels: rollout and actor must share it.
    text_lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])


@dataclass
class WindowConfig:
    """Which denoising steps are stochastic, and are therefore trained. All others are ODE steps."""

    size: Optional[int] = 2  # null: every step but the last
    first: int = 0  # the window starts at this step or later …
    last: Optional[int] = 5  # … and ends before this one; null: the last step of the schedule
    per: str = "step"  # one draw for each training step | prompt | sample


@dataclass
class SamplingConfig:
    """How a sample is drawn during rollout."""

    num_inference_steps: int = 10
    true_cfg_scale: float = 4.0  # 1.0: no classifier-free guidance
    transition: str = "sde"  # sde | cps | dance
    noise_level: float = 1.2  # eta of the transition
    window: WindowConfig = field(default_factory=WindowConfig)


@dataclass
class RolloutConfig:
    """The engine that samples."""

    engine: str = "diffusers"  # see omnirl_hpc.rollout.make_engine
    dtype: str = "bfloat16"
    micro_batch_size: int = 16  # samples generated at once; the last micro-batch is padded to it
    tensor_parallel_size: int = (
        1  # ranks of a replica: tensor_parallel_size x ulysses_degree x cfg_parallel_size
    )
    ulysses_degree: int = 1
    cfg_parallel_size: int = 1
    embedding_cache_size: int = 4096  # prompts whose embeddings are kept in host memory
    # The largest |log p of the actor - log p of the engine| before the first update of a step; more stops the
    # run.
    max_log_prob_gap: float = 5e-3
    # The rest is for engine=vllm_omni.
    # adapter: beside the weights | merged: added into them (no cost in rollout, more at each sync)
    lora: str = "adapter"
    attention: str = "sdpa"  # sdpa | fa3 | flash_attn
    compile: bool = False  # torch.compile of the transformer's blocks
    awake: list[str] = field(
        default_factory=list
    )  # components that stay on the GPU asleep, e.g. [text_encoder, vae]


@dataclass
class LoraConfig:
    """The trainable adapter."""

    rank: int = 64
    alpha: int = 128
    target_modules: Optional[list[str]] = None  # null: the family's list
    dtype: str = "float32"  # master weights; the forward pass runs in actor.dtype


@dataclass
class OptimizerConfig:
    """AdamW, and a learning rate that warms up linearly and then stays."""

    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 1e-4
    warmup_updates: int = 0
    max_grad_norm: float = 1.0


@dataclass
class ActorConfig:
    """The policy that is trained: FSDP2 over a transformer."""

    # lora: an adapter | full: every weight of the transformer, on fp32 master weights. Then actor.lora and
    # rollout.lora mean nothing, and host memory holds weights and Adam's moments (12 bytes a parameter,
    # sharded) in both residencies, for a stop in mid-step.
    train: str = "lora"
    dtype: str = "bfloat16"
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema_decay: Optional[float] = (
        None  # keep a running mean of the adapter, and evaluate and save it too; null: none
    )
    updates_per_step: int = 2  # optimizer steps (mini-batches) in a training step
    micro_batch_size: int = (
        16  # samples in one forward pass; gradients are accumulated over micro-batches and window steps
    )
    shard_size: Optional[int] = None  # ranks that share one copy of the weights; null: all
    attention: str = "sdpa"  # sdpa (torch chooses) | cudnn | flash_attn | fa3; the last three need a GPU
    compile: bool = False  # torch.compile of the transformer's blocks
    activation_checkpointing: bool = True
    # The two branches of guidance: sequential, one after the other | batched, as one batch | null, as the
    # engine
    cfg: Optional[str] = None


@dataclass
class AlgorithmConfig:
    """What every algorithm has."""

    name: str = MISSING  # a file in configs/, or your own as module:Class


@dataclass
class RewardPartConfig:
    """What every reward has. A reward with settings of its own derives from this."""

    name: str = MISSING  # a file in configs/, or your own as module:Class
    weight: float = 1.0  # of its score in the sum of all parts
    workers: int = 1  # spawned processes for each rank
    timeout_seconds: float = (
        300.0  # for each micro-batch of a step; all of them together have that many times as long
    )


@dataclass
class RewardConfig:
    """What scores the images: the weighted sum of one reward or of several, reward=NAME or
    'reward=[NAME,NAME]'.
    """

    # by name; each of its class's own type, which derives from RewardPartConfig
    parts: dict[str, Any] = field(default_factory=dict)
    # sum: of the weighted scores | normalized: each part is normalised in each group of samples first (GDPO)
    mix: str = "sum"
    max_failed_fraction: float = 0.0  # of a step's samples, over all ranks; more stops the run


@dataclass
class EvaluationConfig:
    """Images of fixed prompts from fixed noise, by ODE steps alone, scored by the recipe's reward."""

    every: int = 0  # steps between evaluations during training, and one after the last; 0: never
    keep_best: bool = (
        True  # the checkpoint with the highest score stays, whatever its age (checkpoints/best names it)
    )
    prompts: Optional[str] = None  # a parquet file; null: data.prompts
    num_prompts: int = 16  # the first ones of the table
    samples_per_prompt: int = 1
    num_inference_steps: int = 50
    seed: int = 0  # of the noise


@dataclass
class LoggingConfig:
    """What is written down while the run goes on."""

    samples_every: int = 10  # steps between saved sample images; 0: never
    samples_count: int = 8  # images saved each time
    trackers: list[str] = field(
        default_factory=list
    )  # tensorboard | wandb | trackio: metrics go there too; each is an extra


@dataclass
class CheckpointConfig:
    """What is saved of a run, so that it can go on: adapter, optimizer, algorithm, data cursor; never the
    frozen base.
    """

    every: int = (
        10  # steps; one is also written before the first step (finds a full quota early) and after the last
    )
    keep: int = 2  # the newest ones that are kept
    asynchronous: bool = False  # write in the background while training goes on
    resume_step: Optional[int] = None  # go on from this step's checkpoint; null: from the latest whole one


@dataclass
class Config:
    """One training run. `configs/train.yaml` names the groups; a recipe sets values in them."""

    run_dir: str = MISSING
    steps: int = 300
    seed: int = 0
    # swap: engine and actor take turns on the device | resident: both stay | auto: resident if both fit
    residency: str = "swap"
    determinism: str = (
        "fast"  # strict: two runs of the same recipe on the same layout are equal to the bit | fast
    )
    init_adapter: Optional[str] = (
        None  # an adapter to start from, PEFT's folder or one file; its rank is actor.lora.rank
    )
    timeout_seconds: float = 600.0  # the deadline of every collective operation
    stop_before: float = (
        0.0  # seconds before the Slurm job's time limit to save and end; 0: the job script sees to it
    )
    threads_per_rank: int = 1  # of torch on the CPU; fixed, because sums depend on it
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: Any = MISSING  # of its class's own type, which derives from AlgorithmConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
