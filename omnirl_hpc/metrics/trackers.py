"""Metrics for other tools while a run goes on: TensorBoard, Weights & Biases, Trackio.

Each is an extra of this package. All write below the run directory and need no network; wandb uploads only where WANDB_MODE says so.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from omegaconf import OmegaConf

from omnirl_hpc.config.schema import Config
from omnirl_hpc.hashing import stable_hash
from omnirl_hpc.run_directory import RunDirectory

PROJECT = "omnirl_hpc"

Log = Callable[[int, dict[str, float]], None]  # (step, metrics)
Close = Callable[[], None]


class Trackers:
    """Those of `logging.trackers`, on rank 0 and nowhere else. Use as a context manager."""

    def __init__(self, config: Config, run: RunDirectory, first_step: int, rank: int) -> None:
        self._names = config.logging.trackers if rank == 0 else []
        self._config, self._run, self._first_step = config, run, first_step
        self._open: list[tuple[Log, Close]] = []

    def __enter__(self) -> "Trackers":
        self._open = [STARTS[name](self._config, self._run, self._first_step) for name in self._names]
        return self

    def __exit__(self, *_: object) -> None:
        for _, close in self._open:
            close()

    def log(self, metrics: dict[str, float]) -> None:
        """One finished step."""
        values = {name: value for name, value in metrics.items() if name != "step"}
        for log, _ in self._open:
            log(int(metrics["step"]), values)


def _tensorboard(config: Config, run: RunDirectory, first_step: int) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run.path / "tensorboard", purge_step=first_step)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(config: Config, run: RunDirectory, first_step: int) -> tuple[Log, Close]:
    import wandb

    started = wandb.init(
        project=PROJECT,
        dir=run.path,
        name=run.path.name,
        id=_identity(run),
        resume="allow",
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=_settings(config),
    )
    return lambda step, metrics: started.log(metrics, step=step), started.finish


def _trackio(config: Config, run: RunDirectory, first_step: int) -> tuple[Log, Close]:
    os.environ.setdefault("TRACKIO_DIR", str((run.path / "trackio").resolve()))  # read when the package is imported
    import trackio

    trackio.init(project=PROJECT, name=f"{run.path.name}-{_identity(run)}", resume="allow", config=_settings(config), embed=False)
    return lambda step, metrics: trackio.log(metrics, step=step), trackio.finish


def _identity(run: RunDirectory) -> str:
    """Of the run, the same after a resume."""
    return f"{stable_hash(str(run.path.resolve())):016x}"


def _settings(config: Config) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.structured(config))


STARTS: dict[str, Callable[[Config, RunDirectory, int], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
