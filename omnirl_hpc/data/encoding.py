"""Which encoding is a text file in? Decided before anything is read from it."""

from __future__ import annotations

import codecs
from pathlib import Path

from charset_normalizer import from_bytes

from omnirl_hpc.errors import DataError

SAMPLE = 1 << 20  # bytes that are looked at
# What prompts come in: every encoding of every system would make short texts look like something rare.
NARROW = ("cp1252", "cp1251", "gb18030", "big5", "cp932", "euc_jp", "cp949")
WIDE = ("utf_16", "utf_16_le", "utf_16_be", "utf_32")


def require_encoding(source: Path, encoding: str | None) -> None:
    """Raise DataError where the text file is not in `encoding` (None: UTF-8), naming what it looks like."""
    name = encoding or "utf-8-sig"
    try:
        with source.open(encoding=name) as file:
            zeros = any("\0" in line for line in file)
    except LookupError:
        raise DataError(f"{source}: there is no encoding of text named {encoding}") from None
    except UnicodeError as error:  # of UTF-16 without its mark: no UnicodeDecodeError
        if encoding is not None:
            raise DataError(f"{source} is not {encoding}: {error}") from None
    else:
        if not zeros:
            return
        if encoding is not None:
            raise DataError(f"{source} is not {encoding}: read as that, it holds NUL characters")
    raise DataError(describe(source))


def describe(source: Path) -> str:
    """What a file that is not UTF-8 looks like, and its first line that is not, read as that."""
    number, sample = _from_first_bad_line(source)
    wide = b"\0" in sample or sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    best = from_bytes(sample, cp_isolation=list(WIDE if wide else NARROW)).best()
    said = f"{source} is not UTF-8 in line {number}"
    if best is None:
        return f"{said}, and its encoding is not known: add --encoding NAME"
    # Of several that read these bytes alike, the most common one.
    name = next((name for name in NARROW if name in best.could_be_from_charset), best.encoding)
    line = str(best).lstrip("\ufeff").splitlines()[0]
    return f"{said}, but looks like {name}: if {line[:60]!r} is right, add --encoding {name}"


def _from_first_bad_line(source: Path) -> tuple[int, bytes]:
    """The number of the first line that is not UTF-8 text, and the bytes from there."""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):  # noqa: B007  used after the loop
            try:
                if "\0" in line.decode():
                    break
            except UnicodeDecodeError:
                break
        return number, line + file.read(SAMPLE)
