"""What rank 0 shows while a run goes on: a live bar on a terminal, one plain line a step in a log."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


class ProgressDisplay:
    """Use as a context manager; silent on every rank but 0."""

    def __init__(self, steps: int, rank: int, console: Console | None = None) -> None:
        self._steps = steps
        self._quiet = rank != 0
        self._console = console or Console()
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        if not self._quiet and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, metrics: dict[str, float]) -> None:
        """One finished step."""
        if self._quiet:
            return
        reward = f"reward {metrics['reward/mean']:.6g}  " if "reward/mean" in metrics else ""
        line = (
            f"step {metrics['step'] + 1:>4}/{self._steps}  {reward}loss {metrics['loss']:.3g}  "
            f"grad_norm {metrics['grad_norm']:.3g}  {metrics['time/step']:.1f} s  "
            f"{metrics['images_per_second']:.3g} images/s"
        )
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.console.print(line, highlight=False)
            self._bar.update(self._task, completed=metrics["step"] + 1)


def print_choices(choices: dict[str, str]) -> None:
    """The table of what was chosen, at the start of a run."""
    table = Table("setting", "chosen", title="This run", title_justify="left")
    for name, value in choices.items():
        table.add_row(name, value)
    # A log is no terminal: rich would guess 80 columns and break every line.
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(table)
