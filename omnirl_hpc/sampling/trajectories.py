"""What rollout hands to training."""

from __future__ import annotations

import torch
from tensordict import tensorclass
from torch import Tensor


@tensorclass
class TextEmbeds:
    """Prompt embeddings, right-padded to a common width L. embeds [B, L, D] in the model's dtype, mask [B, L]
    bool.
    """

    embeds: Tensor
    mask: Tensor

    def in_dtype(self, dtype: torch.dtype) -> TextEmbeds:
        return TextEmbeds(self.embeds.to(dtype), self.mask, batch_size=self.batch_size)


@tensorclass
class Trajectories:
    """Samples of one rollout, batch first. B samples, W stochastic steps, S latent tokens of C channels."""

    latents: Tensor  # [B, W + 1, S, C] fp32, at the edges of the window
    log_probs: Tensor  # [B, W] fp32, of the engine
    sigmas: Tensor  # [B, W + 1] fp32, at the edges of the window
    timesteps: Tensor  # [B, W] fp32, what the model is called with at each step of the window
    sigma_max: Tensor  # [B] fp32, the schedule's second sigma
    text: TextEmbeds
    negative: TextEmbeds | None  # None: no guidance
    images: Tensor  # [B, 3, H, W] uint8
    group: Tensor  # [B] int64, the group of the step
    sample: Tensor  # [B] int64, the sample of the prompt
    noise_hash: Tensor  # [B] int64, of the sample's initial and transition noise
    version: Tensor  # [B] int64, the adapter version that produced it


def pad_text(embeds: Tensor, length: int) -> TextEmbeds:
    """[L, D] padded with zeros to [1, length, D], with its mask. Raises ValueError where it does not fit: no
    truncation.
    """
    tokens, width = embeds.shape
    if tokens > length:
        raise ValueError(f"{tokens} tokens do not fit into {length}")
    padded = embeds.new_zeros((1, length, width))
    padded[0, :tokens] = embeds
    return TextEmbeds(padded, (torch.arange(length, device=embeds.device) < tokens)[None], batch_size=[1])
