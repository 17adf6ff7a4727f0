"""Values that are not Hydra's syntax, as overrides."""

from __future__ import annotations

import re


def setting(key: str, value: str) -> str:
    r"""The override that gives `key` this very value. sbatch/common.sh has the same in bash.

    Outside of quotes Hydra reads much punctuation, accents, numbers and `null` as syntax. Within them it
    reads quotes, OmegaConf reads `${`, and both read the backslashes before them; Hydra, those before the
    end, too. The value ??? cannot be given: it is OmegaConf's for one that is missing.
    """
    quoted = re.sub(r'(\\*)"', r'\1\1\\"', literal(value) + '"')  # the end as a quote
    return f'{key}="{quoted[:-2]}"'


def literal(value: str) -> str:
    """What OmegaConf reads as `value`: nothing in it is an interpolation."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
