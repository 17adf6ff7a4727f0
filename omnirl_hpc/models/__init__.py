"""Model families: one file each. A family says what the actor runs, what the engine runs, and where LoRA
goes.
"""

from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.models.qwen_image.family import QwenImage

__all__ = ["ModelFamily", "QwenImage"]
