"""How LTX-2.3's pipelines are driven: by a loop of our own around their networks.

Both stock loops encode text features of hundreds of MB a prompt, copy or bypass their scheduler, and compute
up to four branches of guidance.
"""

from __future__ import annotations

from typing import Any

from omnirl_hpc.data.prompts import Prompt
from omnirl_hpc.models.family import DiffusersDriver, LoopDriver, VllmOmniDriver
from omnirl_hpc.sampling.samples import Condition


class _Ltx2Driver(LoopDriver):
    """What both engines have in common."""

    def encode(self, pipeline: Any, prompt: Prompt) -> Condition:
        """What the connectors make of the text encoder's hidden states; they replace padding by registers."""
        embeds, mask, *_ = pipeline.encode_prompt(
            prompt.prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.family.spec.max_text_tokens,
        )
        video, audio, _ = pipeline.connectors(embeds, mask, padding_side="left")
        return {"video": video[0], "audio": audio[0]}


class Ltx2Diffusers(_Ltx2Driver, DiffusersDriver):
    """See PipelineDriver."""


class Ltx2VllmOmni(_Ltx2Driver, VllmOmniDriver):
    """See PipelineDriver."""

    def engine_options(self) -> dict[str, Any]:
        return {"extras": {}}  # else a pydantic FieldInfo, which the pipeline stumbles over
