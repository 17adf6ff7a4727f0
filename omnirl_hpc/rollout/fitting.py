"""How many samples fit into memory at once, found out before the first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from omnirl_hpc.errors import EngineError
from omnirl_hpc.rollout.engine import RolloutEngine, SampleRequest

log = logging.getLogger(__name__)


def fit_micro_batch_size(
    engine: RolloutEngine,
    requests: Sequence[SampleRequest],
    width: int,
    device: torch.device,
    may_shrink: bool,
) -> int:
    """Generate one micro-batch; where any rank runs out of memory, all ranks halve `engine.micro_batch_size`
    and try again.

    Collective. All micro-batches of a run have one shape, so what fits here fits later. `width` is the
    largest that conditions are padded to in the run. Raises EngineError on every rank where a single sample
    does not fit, or where the size must not change.
    """
    while True:
        size = engine.micro_batch_size
        probe = [replace(requests[i % len(requests)], width=width) for i in range(size)]
        fits = torch.tensor(int(_try(engine, probe)), device=device)
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        if fits:
            return size
        if size == 1:
            raise EngineError(
                "not even one sample at a time fits into the GPU's memory: "
                "use smaller images or a larger replica"
            )
        if not may_shrink:
            raise EngineError(
                f"rollout.micro_batch_size={size} does not fit into the GPU's memory, and determinism=strict "
                f"does not change it: set {size // 2}"
            )
        engine.micro_batch_size = size // 2
        log.warning(
            "rollout.micro_batch_size=%d does not fit into the GPU's memory: all ranks go on with %d",
            size,
            size // 2,
        )


def _try(engine: RolloutEngine, requests: Sequence[SampleRequest]) -> bool:
    try:
        for _ in engine.generate(requests):
            pass
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
