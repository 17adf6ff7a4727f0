"""Metrics for other tools while a run goes on: TensorBoard, Weights & Biases, Trackio.

Each is an extra of this package. All write below the run directory and need no network; wandb uploads only
where WANDB_MODE says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, cast

from omegaconf import OmegaConf

from omnirl_hpc.config.schema import Config
from omnirl_hpc.errors import ConfigError, OutputError
from omnirl_hpc.hashing import stable_hash
from omnirl_hpc.run_directory import RunDirectory

logger = logging.getLogger(__name__)

PROJECT = "omnirl_hpc"

Log = Callable[[int, dict[str, float]], None]  # (step, metrics)
Close = Callable[[], None]


class Trackers:
    """Those of `logging.trackers`, on rank 0 and nowhere else. Use as a context manager, before weights load.

    Metrics are safe in metrics.jsonl: a tracker that cannot start is an error, one that fails later is turned
    off for the rest of the run. Trackers are other people's code that talks to disks, services and networks,
    and may raise anything: this is why `Exception` is caught here.
    """

    def __init__(self, config: Config, run: RunDirectory, rank: int) -> None:
        self._config, self._run = config, run
        self._names = config.logging.trackers if rank == 0 else []
        self._open: dict[str, tuple[Log, Close]] = {}
        # A run that was killed makes again what it did since its checkpoint. One that was sent back makes
        # something else.
        self._known = run.last_step_tracked() if config.checkpoint.resume_step is None else -1

    def __enter__(self) -> Trackers:
        for name in self._names:
            try:
                self._open[name] = STARTS[name](self._config, self._run)
            except Exception as error:
                raise ConfigError(
                    f"the tracker {name} does not start: {_line(error)}; drop it from logging.trackers"
                ) from error
        return self

    def __exit__(self, *error: object) -> None:
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)

    def log(self, metrics: dict[str, float]) -> None:
        """One finished step; nothing where a tracker was told of it before the run was killed."""
        step = int(metrics["step"])
        if step <= self._known:
            return
        try:
            if self._open:
                self._run.note_step_tracked(step)
        except OutputError as error:  # a run that went on would tell them again
            for name in list(self._open):
                self._turn_off(name, error)
        values = {name: value for name, value in metrics.items() if name != "step"}
        for name, (log, _) in list(self._open.items()):
            self._try(name, log, step, values)

    def _try(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:
            self._turn_off(name, error)

    def _turn_off(self, name: str, error: Exception) -> None:
        del self._open[name]
        logger.warning(
            "the tracker %s failed and is off for the rest of this run: %s; %s has all metrics",
            name,
            _line(error),
            self._run.metrics,
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _tensorboard(config: Config, run: RunDirectory) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run.path / "tensorboard", purge_step=config.checkpoint.resume_step)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(config: Config, run: RunDirectory) -> tuple[Log, Close]:
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


def _trackio(config: Config, run: RunDirectory) -> tuple[Log, Close]:
    os.environ.setdefault(
        "TRACKIO_DIR", str((run.path / "trackio").resolve())
    )  # read when the package is imported
    import trackio

    trackio.init(
        project=PROJECT,
        name=f"{run.path.name}-{_identity(run)}",
        resume="allow",
        config=_settings(config),
        embed=False,
    )
    return lambda step, metrics: trackio.log(metrics, step=step), trackio.finish


def _identity(run: RunDirectory) -> str:
    """Of the run, the same after a resume."""
    return f"{stable_hash(str(run.path.resolve())):016x}"


def _settings(config: Config) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(config)))


STARTS: dict[str, Callable[[Config, RunDirectory], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
