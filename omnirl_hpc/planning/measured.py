"""Every figure of a plan that is measured and not computed, in one place, so that new measurements change one
file.

One H200, full-size Qwen-Image in bf16: benchmarks/results/2026-11-30_h200_*.md; attention by cuDNN, which
SDPA takes there. "Vectors" are rows of the transformer's width in its dtype; per token they hold whatever the
image size, the batch and the width of the text.
"""

from __future__ import annotations

# Share of the GPU's bf16 peak that is reached, by (rollout.engine, rollout.lora, rollout.compile). Decoding
# is in it.
ROLLOUT_EFFICIENCY = {
    ("vllm_omni", "merged", True): 0.514,  # 0.653 s an image with 128 text tokens: 20 forwards of 16.6 TF
    # Measured with slower attention (0.836 and 0.864 s an image with 64 text tokens), less the 0.107 s that
    # it cost
    ("vllm_omni", "adapter", True): 0.435,
    ("vllm_omni", "merged", False): 0.42,
    ("vllm_omni", "adapter", False): 0.35,  # the last and the 20 % that LoRA beside the weights costs
    ("diffusers", "adapter", False): 0.355,  # 39.5 ms a forward of 16.7 TF, plus 20 % for LoRA
}
# By actor.compile, with actor.attention=sdpa, of the actor alone with 256 text tokens
OLD_LOG_PROB_EFFICIENCY = {False: 0.333, True: 0.461}  # 56.5 and 40.8 ms a forward of 18.6 TF
ACTOR_EFFICIENCY = {
    False: 0.272,
    True: 0.438,
}  # 214 and 133 ms for forward, recomputed forward and backward: 57.6 TF
FP32_SLOWDOWN = 2.0  # at least: TF32 has half the peak of bf16

HOST_LINK_EFFICIENCY = 0.86  # 55 GB/s of PCIe 5's 64, page-locked
SYNC_BYTES_PER_SECOND = 3.8e9  # 0.22 s for the 0.85 GB of LoRA r64 in bf16, checksums on both sides included
MERGE_BYTES_PER_SECOND = 43e9  # 0.95 s more for the 41 GB that merged LoRA is recomputed in

# Vectors per token that autograd keeps of one block without checkpointing, but for LoRA's own; counted with
# saved_tensors_hooks (tests/planning/test_estimate.py). In bf16 rotary embeddings and norms are kept in fp32.
SAVED_VECTORS = {"float32": 19, "bfloat16": 23}
FULL_SAVED_VECTORS = (
    7  # and as many more where all weights are trained: for norms and modulation, which LoRA leaves frozen
)
# Vectors per token in the tensors that come and go in the actor's backward pass: what is left of 63.7 GiB
# after weights, gradients and what autograd keeps.
ACTOR_WORKING_VECTORS = 10
# Values per pixel of an image that the VAE decodes: 17.6 GiB for 16 images of 512 x 512, beside 38.7 of
# weights. A micro-batch with 1024 text tokens did not need more, so that the transformer's share is only
# known to be less.
DECODE_VALUES_PER_PIXEL = 2250

CONTEXT_BYTES = 1.5 * 2**30  # CUDA context, cuBLAS and NCCL buffers; outside of torch's own count
# Of host memory: a rank of the tiny recipe on the CPU; and what is left of 89.0 GiB after 81.1 of page-locked
# copies.
PROCESS_BYTES = 0.6 * 2**30
CUDA_HOST_BYTES = 7.3 * 2**30
