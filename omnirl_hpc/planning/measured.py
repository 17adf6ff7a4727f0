"""Every figure of a plan that is measured and not computed, in one place, so that new measurements change one file.

Where nothing else is said: one H200, full-size Qwen-Image in bf16, benchmarks/results/2026-11-29_h200_rl_step.md. "Vectors" are
rows of the transformer's width in its dtype; per token they hold whatever the image size, the batch and the width of the text.
"""

from __future__ import annotations

# Share of the GPU's bf16 peak that is reached, by (rollout.engine, rollout.lora, rollout.compile). Decoding is in it.
ROLLOUT_EFFICIENCY = {
    ("vllm_omni", "adapter", False): 0.31,  # 1.20 s an image: 20 forwards of 18.6 TF
    ("vllm_omni", "merged", True): 0.45,  # 0.83 s an image
    ("vllm_omni", "merged", False): 0.375,  # the first, less the 20 % that LoRA beside the weights costs
    ("vllm_omni", "adapter", True): 0.38,  # the second, with the 19 % that it costs there
    ("diffusers", "adapter", False): 0.355,  # 39.5 ms a forward of 16.7 TF, plus 20 % for LoRA
}
OLD_LOG_PROB_EFFICIENCY = 0.31  # 61 ms a forward of 18.6 TF
ACTOR_EFFICIENCY = 0.28  # 207 ms for forward, recomputed forward and backward: 57.6 TF; eager, actor.attention=sdpa
FP32_SLOWDOWN = 2.0  # at least: TF32 has half the peak of bf16

HOST_LINK_EFFICIENCY = 0.86  # 55 GB/s of PCIe 5's 64, page-locked
SYNC_BYTES_PER_SECOND = 1.7e9  # 0.5 s for the 0.85 GB of LoRA r64 in bf16, checksums on both sides included
MERGE_BYTES_PER_SECOND = 30e9  # 1.3 s more for the 41 GB that merged LoRA is recomputed in

# Vectors per token that autograd keeps of one block without checkpointing, but for LoRA's own; counted with
# saved_tensors_hooks (tests/planning/test_estimate.py). In bf16 rotary embeddings and norms are kept in fp32.
SAVED_VECTORS = {"float32": 19, "bfloat16": 23}
# Vectors per token in the tensors that come and go: in the actor's backward pass what is left of 68.7 GiB after weights,
# gradients and what autograd keeps (the table has 107.1 GiB, in which torch counts 38.4 that CuMem had unmapped); in
# generation, VAE included, what is left of 83.7 GiB after 39.1 of weights, at 16 images of 1024 + 1024 tokens.
ACTOR_WORKING_VECTORS = 44
GENERATION_WORKING_VECTORS = 237

CONTEXT_BYTES = 1.5 * 2**30  # CUDA context, cuBLAS and NCCL buffers; outside of torch's own count
# Of host memory: a rank of the tiny recipe on the CPU; and what is left of 89.0 GiB after 81.1 of page-locked copies.
PROCESS_BYTES = 0.6 * 2**30
CUDA_HOST_BYTES = 7.3 * 2**30
