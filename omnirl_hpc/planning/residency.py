"""residency=auto: whether engine and actor stay on the GPU together."""

from __future__ import annotations

from omnirl_hpc.config.schema import Config
from omnirl_hpc.layout import Layout
from omnirl_hpc.planning.estimate import estimate, typical_text_width, with_residency
from omnirl_hpc.planning.gpus import GIB

SAFE_SHARE = 0.9  # of the GPU's memory that a plan may fill: estimates are good to a tenth


def choose_residency(
    config: Config, layout: Layout, gpu_bytes: float, text_width: int | None = None
) -> tuple[str, str]:
    """(swap or resident, why) for GPUs with that much memory.

    text_width: tokens that prompts are padded to (None: typical, as in `estimate`; what a table needs only
    its tokenizer knows). Raises ConfigError where the model is not known.
    """
    text_width = text_width or typical_text_width(config)
    resident, swap = (
        estimate(with_residency(config, mode), layout, text_width).gpu_bytes for mode in ("resident", "swap")
    )
    room = f"{gpu_bytes / GIB:.0f} GiB, with {text_width} text tokens"
    if resident <= SAFE_SHARE * gpu_bytes:
        return "resident", f"both together need {resident / GIB:.0f} of {room}"
    if swap <= gpu_bytes:
        return "swap", f"both together would need {resident / GIB:.0f} of {room}, in turns {swap / GIB:.0f}"
    return (
        "swap",
        f"neither fits: both together would need {resident / GIB:.0f}, in turns {swap / GIB:.0f} of {room}",
    )
