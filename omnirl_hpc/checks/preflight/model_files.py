"""Is a checkpoint in diffusers' layout complete? Looks at names, sizes and headers, so that 60 GB take no
time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from omnirl_hpc.errors import DataError

LARGEST_HEADER = 100_000_000  # bytes; the limit of safetensors itself
SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def find_problems(folder: Path) -> list[str]:
    """What is missing or damaged in the checkpoint, one sentence each with the file's name; empty where it is
    complete.
    """
    try:
        index = _read_json(folder / "model_index.json")
    except DataError as error:
        return [str(error)]
    components = [name for name, kind in index.items() if isinstance(kind, list) and kind[0] is not None]
    return [problem for name in components for problem in _component_problems(folder, name)]


def parameter_shapes(component: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a component's *.safetensors. Raises DataError for a file that is
    damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(component.glob("*.safetensors")):
        shapes |= {name: tuple(tensor["shape"]) for name, tensor in read_header(file).items()}
    return shapes


def read_header(file: Path) -> dict[str, Any]:
    """Tensor name -> dtype, shape, data_offsets. Raises DataError where the file has not the size that its
    header says.

    The format: 8 bytes with the header's length N (little endian), N bytes of JSON, then the tensors, with
    offsets from there.
    """
    name = f"{file.parent.name}/{file.name}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise DataError(
                    f"{name} is a git-lfs pointer, not the file (git lfs pull, or omnirl-hpc prefetch)"
                )
            if not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise DataError(f"{name} is cut short or damaged: {size} bytes, no header")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror})") from None
    except ValueError:
        raise DataError(f"{name} is damaged: its header is not JSON") from None
    header.pop("__metadata__", None)
    expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != expected:
        raise DataError(f"{name} has {size} bytes, its header says {expected}")
    return header


def _component_problems(folder: Path, component: str) -> list[str]:
    path = folder / component
    if not any(path.glob("*.json")):
        return [f"{component}/ is missing or empty"]
    problems: list[str] = []
    held: dict[str, dict[str, Any] | None] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            held[file.name] = read_header(file)
        except DataError as error:
            problems.append(str(error))
            held[file.name] = None
    indices = sorted(path.glob("*.safetensors.index.json"))
    for index in indices:
        try:
            problems += _index_problems(component, _read_json(index)["weight_map"], held)
        except DataError as error:
            problems.append(str(error))
    if not indices and any(SHARD.search(name) for name in held):
        problems.append(f"{component}/ has shards but no *.safetensors.index.json")
    if not indices and not held and (path / "config.json").is_file():
        problems.append(f"{component}/ has no *.safetensors")
    return problems


def _index_problems(component: str, weight_map: dict[str, str], held: dict[str, Any]) -> list[str]:
    problems = [f"{component}/{file} is missing" for file in sorted(set(weight_map.values()) - held.keys())]
    for file, header in held.items():
        wanted = {tensor for tensor, place in weight_map.items() if place == file}
        if header is not None and (lacking := sorted(wanted - header.keys())):
            problems.append(
                f"{component}/{file} lacks {len(lacking)} tensors that the index says it has, "
                f"such as {lacking[0]}"
            )
    return problems


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file.name} cannot be read ({error})") from None
