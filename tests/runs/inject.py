"""`python -m tests.runs.inject ACTION:PLACE:STEP:RANK … -- train …`: the program, with faults at named
places.

ACTION: die (kill -9), term, usr1 (a signal to this rank), stop (a user's file STOP), nan (gradient),
        pause (makes the file PAUSED, until there is a file GO).
PLACE:  rollout (after a micro-batch), actor (after the first update of a step), sync (before the engine
        shows that it has what is new), evaluation (after the first policy that is not the base),
        save (rank's part of writing the checkpoint after STEP steps). RANK may be `all`.
`memory` instead of a fault: rank 0 notes its resident memory in bytes after each step, in the file `resident`
of run_dir.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Faults:
    """What is still to happen on this rank."""

    orders: list[tuple[str, str, int]]  # action, place, step
    run_dir: Path
    step: int = -1

    def at(self, place: str, step: int | None = None) -> None:
        step = self.step if step is None else step
        for order in [order for order in self.orders if order[1:] == (place, step)]:
            self.orders.remove(order)
            self.do(order[0])

    def do(self, action: str) -> None:
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif action == "usr1":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif action == "stop":
            (self.run_dir / "STOP").touch()
        elif action == "pause":
            (self.run_dir / "PAUSED").touch()
            while not (self.run_dir / "GO").exists():
                time.sleep(0.05)
            (self.run_dir / "GO").unlink()
            (self.run_dir / "PAUSED").unlink()
        else:
            raise ValueError(action)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def patch(faults: Faults, options: list[str]) -> None:
    from omnirl_hpc import trainer
    from omnirl_hpc.checkpoints.checkpointer import Checkpointer
    from omnirl_hpc.evaluation.evaluator import Evaluator
    from omnirl_hpc.rewards.mix import RewardMix
    from omnirl_hpc.sync import Sync
    from omnirl_hpc.trainer import Trainer

    train_step, submit = Trainer.train_step, RewardMix.submit
    confirm = Sync.confirm
    accumulate, apply, write = trainer.accumulate_gradients, trainer.apply_gradients, Checkpointer._write_rest
    save_media = Evaluator._save_media

    def counted_step(self, step):
        faults.step = step
        metrics = train_step(self, step)
        if "memory" in options and self.layout.rank == 0:
            with (faults.run_dir / "resident").open("a") as file:
                file.write(f"{resident_bytes()}\n")
        return metrics

    def faulty_submit(self, batch):
        submit(self, batch)
        faults.at("rollout")

    def faulty_accumulate(actor, *arguments, **options):
        accumulate(actor, *arguments, **options)
        if ("nan", "actor", faults.step) in faults.orders:
            next(p for p in actor._parameters.values() if p.grad is not None).grad.mul_(float("nan"))

    def faulty_apply(*arguments):
        apply(*arguments)
        faults.at("actor")

    def faulty_confirm(self, version):
        faults.at("sync", version - 1)
        return confirm(self, version)

    def faulty_save_media(self, folder, *arguments):
        save_media(self, folder, *arguments)
        if folder.name != "base":
            faults.at("evaluation", int(folder.parent.name.removeprefix("step_")) - 1)

    def faulty_write(self, step, *arguments):
        write(self, step, *arguments)
        faults.at("save", step)

    Trainer.train_step, RewardMix.submit, Checkpointer._write_rest = counted_step, faulty_submit, faulty_write
    trainer.accumulate_gradients, trainer.apply_gradients = faulty_accumulate, faulty_apply
    Sync.confirm = faulty_confirm
    Evaluator._save_media = faulty_save_media


def main() -> None:
    from omnirl_hpc.cli import train as command
    from omnirl_hpc.cli.main import main as program
    from omnirl_hpc.launch.identity import find_identity

    end = sys.argv.index("--")
    orders, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    rank = str(find_identity().rank)
    wanted = [order.split(":") for order in orders if ":" in order]
    mine = [(action, place, int(step)) for action, place, step, who in wanted if who in (rank, "all")]
    train = command.train

    def faulty_train(loaded, *given):  # torch is imported only here: everything before runs as it always does
        patch(Faults(mine, Path(loaded.config.run_dir)), orders)
        train(loaded, *given)

    command.train = faulty_train
    program(arguments)


if __name__ == "__main__":
    main()
