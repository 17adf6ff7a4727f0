"""Errors that end a command with one sentence instead of a traceback, and the exit codes of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXIT_FAILED = 1  # the run started and could not go on
EXIT_USAGE = 2  # a setting, a file or the installation is wrong; nothing was started
EXIT_INTERRUPTED = 130  # by Ctrl-C; of a training run, by the second one: nothing more is saved

EXIT_NO_READER = 141  # nobody reads the output any more, as in `status RUN | head -n 1`; 128 + SIGPIPE


class OmniRLError(Exception):
    """The run cannot go on. The message is one sentence that names the cause and, where there is one, the
    cure.
    """

    exit_code = EXIT_FAILED


class ConfigError(OmniRLError):
    """A setting is wrong. Wherever it can be, found before torch is imported, weights are loaded or a process
    group is formed.
    """

    exit_code = EXIT_USAGE


class ResumeError(ConfigError):
    """A run cannot go on from what its folder holds, and must not start over there. All ranks raise it
    together.
    """


class DataError(OmniRLError):
    """A file of the user's cannot be used. The message names file, row group and row where they are known."""

    exit_code = EXIT_USAGE


class SyncError(OmniRLError):
    """The weights in the engine are not the actor's."""


class RewardError(OmniRLError):
    """A reward could not score its samples. The message names the reward."""


class MismatchError(OmniRLError):
    """Engine and actor do not compute the same log-probabilities."""


class CheckpointError(OmniRLError):
    """A checkpoint could not be written, or does not fit the run."""


class OutputError(OmniRLError):
    """A result cannot be written."""


class LockLostError(OmniRLError):
    """The run holds its directory no longer: another one may have taken it over. It must not write there."""


class NonFiniteError(OmniRLError):
    """A loss or a gradient is NaN or infinite."""


class EngineError(OmniRLError):
    """The rollout engine cannot go on, or does not do what was asked of it."""


class LaunchError(OmniRLError):
    """The ranks of the job do not come together."""


class PreflightError(OmniRLError):
    """A node, a device or a file on them is not as a run needs it. All ranks raise it together."""

    def __init__(self, message: str, findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)


class FetchError(OmniRLError):
    """A download did not end well."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with `message` where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def one_of(key: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ConfigError naming the choices where `value` is none of them."""
    shown = ", ".join("null" if a is None else str(a) for a in allowed)
    require(value in allowed, f"{key}={value} is not known; it must be one of: {shown}")
