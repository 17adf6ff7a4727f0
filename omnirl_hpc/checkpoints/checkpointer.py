"""Checkpoints: written whole or not at all, found whole or not at all.

    checkpoints/step_000010/    state after 10 steps
        adapter/                the current policy's LoRA in PEFT's format, fp32 master weights
        ema/, old/, …           the same of every other policy that is kept
        optimizer/              torch DCP, sharded; loads on any number of ranks; with actor.train=full
                                the weights of all policies too, instead of the folders above
        state.json              step, data cursor, algorithm, schedule, configuration, versions
        manifest.json           size and CRC-32 of every other file, by the rank that wrote it; its
                                presence and truth make a checkpoint whole
    checkpoints/latest          the name of the newest one
    checkpoints/best            the name of the one with the highest evaluation score, which stays whatever
                                its age

A checkpoint is written under a temporary name, renamed when complete, and `latest` moves last. Random streams
have no state: every draw is a function of its identity (sampling/noise.py). A frozen base is not saved.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from omnirl_hpc.checkpoints.adapters import save_adapter
from omnirl_hpc.checkpoints.files import (
    Fault,
    checkpoint_path,
    describe_files,
    find_checkpoint,
    find_fault,
    read_state,
    steps_in,
    write_text,
    writer,
)
from omnirl_hpc.config.schema import CheckpointConfig
from omnirl_hpc.errors import CheckpointError, ConfigError, LockLostError
from omnirl_hpc.launch.agreement import by_rank_0, gather, raise_on_all_ranks
from omnirl_hpc.models.experts import parameters_of, tensors_by_name
from omnirl_hpc.sharded_files import TensorFileReader, describe, reading

log = logging.getLogger(__name__)

SHARDED = "optimizer"
PROBE_BYTES = 1 << 20

Manifest = dict[str, tuple[int, int]]  # file -> size in bytes, CRC-32


@dataclass(frozen=True)
class CheckpointContent:
    """What goes into a checkpoint."""

    step: int  # finished steps
    adapters: dict[
        str, dict[str, Tensor]
    ]  # full tensors by folder: `adapter`, `ema`, `old`; empty where all weights are trained
    sharded: dict[str, Tensor]  # of the optimizer, and all weights where these are trained
    state: dict[str, Any]  # JSON
    peft_config: dict[str, Any] | None  # of the adapters
    best: int | None = None  # the step whose checkpoint stays whatever its age


class Checkpointer:
    """Writes and finds the checkpoints of one run. Constructor and public methods are collective.

    No other run writes to the folder: before each change `require_lock` raises LockLostError where this run
    has lost it, and then nothing is touched on any rank. What a killed save left there is cleared away once
    there is a whole checkpoint, and not before.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        rank: int,
        timeout_seconds: float,
        require_lock: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._require_lock = require_lock
        self._config = config
        self._rank = rank
        # Groups of their own: the messages of a background save must mix neither with training's nor with
        # those by which the ranks agree that it has ended.
        timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._agreement = dist.new_group(backend="gloo", timeout=timeout)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[Manifest]] | None = None
        self._best: int | None = None
        self._everywhere(self._bring_back, "bring back what an earlier job left")

    # ---------------------------------------------------------------- writing

    def save(self, content: CheckpointContent) -> None:
        """Write a checkpoint; in the background if so configured. Raises CheckpointError on every rank where
        any failed.
        """
        self.wait()
        self._best = content.best
        what = f"write checkpoint {content.step}"
        with self._undoing(content.step):
            self._everywhere(lambda: self._prepare(content.step), what)
            if self._config.asynchronous:
                started: list[Future[Manifest]] = []
                self._everywhere(lambda: started.append(self._start_writing(content)), what)
                self._pending = content.step, started[0]
            else:
                self._complete(content.step, self._everywhere(lambda: self._write(content), what))

    def poll(self) -> None:
        """Complete a background save that has ended on all ranks."""
        if self._pending is not None:
            done = torch.tensor(int(self._pending[1].done()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._agreement)
            if done:
                self.wait()

    def wait(self) -> None:
        """Complete a background save, however long it takes."""
        if self._pending is not None:
            (step, written), self._pending = self._pending, None
            with self._undoing(step):
                self._complete(step, self._everywhere(written.result, f"write checkpoint {step}"))

    def _path(self, step: int) -> Path:
        return checkpoint_path(self._folder, step)

    def _temporary(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.tmp"

    def _prepare(self, step: int) -> None:
        if self._rank == 0:
            shutil.rmtree(self._temporary(step), ignore_errors=True)
            self._temporary(step).mkdir(parents=True)

    def _write(self, content: CheckpointContent) -> Manifest:
        """Returns the entries of the files that this rank wrote."""
        dcp.save(content.sharded, storage_writer=self._writer(content.step), process_group=self._group)
        self._write_rest(content.step, content.adapters, content.state, content.peft_config)
        return describe_files(self._temporary(content.step), self._rank)

    def _start_writing(self, content: CheckpointContent) -> Future[Manifest]:
        """The same in the background, from copies that training cannot change any more."""
        adapters = {} if self._rank else {folder: _on_host(lora) for folder, lora in content.adapters.items()}
        saving = dcp.async_save(
            content.sharded, storage_writer=self._writer(content.step), process_group=self._group
        )
        assert isinstance(saving, Future)  # torch returns something else only with a stager

        def finish() -> Manifest:
            saving.result()
            self._write_rest(content.step, adapters, content.state, content.peft_config)
            return describe_files(self._temporary(content.step), self._rank)

        return self._background.submit(finish)

    def _writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self._temporary(step) / SHARDED, sync_files=True)

    def _write_rest(
        self,
        step: int,
        adapters: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        peft_config: dict[str, Any] | None,
    ) -> None:
        if self._rank == 0:
            for folder, lora in adapters.items():
                assert peft_config is not None  # it comes with adapters
                save_adapter(self._temporary(step) / folder, lora, peft_config)
            write_text(self._temporary(step) / "state.json", json.dumps(state, indent=1))

    def _complete(self, step: int, parts: list[Manifest]) -> None:
        """All ranks have written: write the manifest, rename, move `latest`, drop the oldest."""
        manifest = {name: entry for part in parts for name, entry in part.items()}
        self._everywhere(lambda: self._publish(step, manifest), f"complete checkpoint {step}")

    def _publish(self, step: int, manifest: Manifest) -> None:
        if self._rank:
            return
        folder = self._temporary(step)
        write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
        self._replace(self._path(step), folder)
        self._point("latest", step)
        self._clear()
        if self._best is not None:
            self._point("best", self._best)
        aging = [step for step in steps_in(self._folder) if step != self._best]
        for old in aging[: -self._config.keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def _replace(self, path: Path, new: Path) -> None:
        """What is replaced is of a run that went another way, or not evaluated yet; it goes when the new one
        is in its place.
        """
        old = path.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _undoing(self, step: int) -> Iterator[None]:
        """Where the save of `step` fails, leave the folder as it was before."""
        try:
            yield
        except CheckpointError:
            if self._rank == 0:
                old, path = self._path(step).with_suffix(".old"), self._path(step)
                if old.exists() and not path.exists():
                    with suppress(OSError):  # the next start tries again
                        old.rename(path)
                shutil.rmtree(self._temporary(step), ignore_errors=True)
            raise

    def _bring_back(self) -> None:
        """Give what a killed save moved out of the way, or had finished, its name. By rank 0."""
        if self._rank:
            return
        finished = (
            path for path in self._folder.glob("step_*.tmp") if find_fault(path, quickly=True) is None
        )
        for path in (*self._folder.glob("step_*.old"), *finished):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))

    def _clear(self) -> None:
        """Clear away what killed saves left. By rank 0, when there is a whole checkpoint."""
        for path in (*self._folder.glob("step_*.old"), *self._folder.glob("step_*.tmp")):
            shutil.rmtree(path, ignore_errors=True)

    def _point(self, name: str, step: int) -> None:
        write_text(self._folder / f"{name}.tmp", self._path(step).name)
        (self._folder / f"{name}.tmp").rename(self._folder / name)

    def _everywhere(self, action: Callable[[], Any], what: str) -> list[Any]:
        """Do `action` on every rank and agree on its success, so that no rank waits for one that failed; what
        each returned.
        """
        raise_on_all_ranks(
            self._require_lock, LockLostError, self._agreement
        )  # then nothing is undone either
        result = error = None
        try:
            result = action()
        except (
            OSError,
            RuntimeError,
            SafetensorError,
            CheckpointException,
            ConfigError,
            CheckpointError,
        ) as failure:
            error = f"rank {self._rank}: {self._cause(failure)}"
        outcomes = gather((result, error), self._agreement)
        if failed := [error for _, error in outcomes if error]:
            raise CheckpointError(
                f"could not {what} in {self._folder}: {failed[0]}; earlier checkpoints are untouched"
            )
        return [result for result, _ in outcomes]

    def _cause(self, failure: BaseException) -> str:
        """One line. Torch's errors do not name what the operating system said, so that it is asked again."""
        text = describe(failure)
        probe = self._folder / f"probe_{self._rank}.tmp"
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        except OSError as refusal:
            reason = refusal.strerror or str(refusal)
            return text if reason in text else f"{reason} ({text})"
        finally:
            probe.unlink(missing_ok=True)
        return text

    # ---------------------------------------------------------------- reading

    def find(self) -> Path | None:
        """The checkpoint to go on from: the one asked for, else the newest whole one; None where there is no
        checkpoint at all. Says which it passed over.

        Ranks share the reading, and agree. Raises ConfigError on every rank where the one asked for is not
        there or not whole, where there are some and none is whole, and where a rank is refused the reading.
        """
        steps = by_rank_0(lambda: steps_in(self._folder), ConfigError)
        asked = self._config.resume_step
        return find_checkpoint(
            self._folder, asked, "checkpoint.resume_step=", steps=steps, fault_of=self._find_fault
        )

    def _find_fault(self, path: Path) -> Fault | None:
        """Why a checkpoint cannot be used, and who says so. Each file is read by one rank, its writer where
        ranks are as many.
        """
        ranks = dist.get_world_size()
        fault = find_fault(path, mine=lambda file: writer(file) % ranks == self._rank)
        if fault is not None:
            said = f"{fault.text}, says rank {self._rank} on {socket.gethostname()}"
            fault = Fault(said, fault.unreadable)
        faults = [fault for fault in gather(fault, self._agreement) if fault is not None]
        return max(faults, key=lambda fault: fault.unreadable, default=None)

    def load(self, path: Path, sharded: dict[str, Tensor]) -> None:
        """Fill `sharded` in place from a checkpoint. Later ones are put aside, and never deleted: this run
        goes another way.
        """
        with reading(str(path / SHARDED), CheckpointError):
            dcp.load(sharded, storage_reader=TensorFileReader(path / SHARDED), process_group=self._group)
        self._everywhere(lambda: self._continue_from(path), f"go on from {path.name}")

    def _continue_from(self, path: Path) -> None:
        if self._rank:
            return
        step = read_state(path)["step"]
        for later in steps_in(self._folder):
            if later > step:
                self._put_aside(self._path(later))
        self._point("latest", step)
        best = self._folder / "best"
        if best.exists() and not (self._folder / best.read_text()).exists():
            best.unlink()
        self._clear()

    def _put_aside(self, path: Path) -> None:
        numbered = (path.with_name(f"abandoned_{path.name}_{n}") for n in itertools.count(1))
        path.rename(next(name for name in numbered if not name.exists()))


def load_weights(path: Path, networks: Mapping[str, nn.Module]) -> None:
    """Fill whole networks, in their own dtype, from a checkpoint with actor.train=full. Not collective.

    Raises CheckpointError where the two do not fit, and where the run has deleted the checkpoint meanwhile.
    """
    places = tensors_by_name(networks, parameters_of)
    weights = {name: parameter.detach() for name, parameter in places.items()}
    with reading(f"the weights in {path}", CheckpointError):
        dcp.load(weights, storage_reader=TensorFileReader(path / SHARDED), no_dist=True)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
