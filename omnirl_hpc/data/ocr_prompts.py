"""Prompts that ask for a text in the image: a scene from a template,
and a few words in quotes as the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

SCENES = (
    'A wooden sign at the edge of a forest that reads "{text}"',
    'A neon sign in a rainy street at night, glowing with the words "{text}"',
    'A hand-painted banner above a market stall saying "{text}"',
    'A chalkboard in a small café with "{text}" written on it in white chalk',
    'The cover of an old book with the golden title "{text}"',
    'A postage stamp showing a lighthouse and the words "{text}"',
    'A train station board that displays "{text}" in orange letters',
    'A birthday cake decorated with "{text}" in blue icing',
    'A robot holding up a cardboard sign with "{text}" on it',
    'A ship with the name "{text}" painted on its bow',
    'A poster on a brick wall announcing "{text}" in bold red type',
    'A coffee cup on a desk, printed with "{text}"',
    'A weathered stone plaque engraved with "{text}"',
    'A hot-air balloon over green hills carrying the words "{text}"',
)
WORDS = (
    "river night garden silver winter open quiet north bright copper harbor paper early lemon seven stone "
    "morning cloud velvet summer orange mountain letter signal market window yellow forest island planet "
    "rocket violet station music bridge candle ocean little sunrise maple"
).split()


def ocr_prompts(count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` rows with the columns prompt, target and id, a function of `seed` only."""
    draw = random.Random(seed)
    for row in range(count):
        target = " ".join(draw.sample(WORDS, draw.choice((1, 1, 2, 2, 3)))).title()
        yield {"id": f"ocr-{seed}-{row}", "prompt": draw.choice(SCENES).format(text=target), "target": target}


def write_ocr_table(path: str, count: int, seed: int, rows_per_group: int = 1024) -> None:
    """Write `ocr_prompts` as a parquet table with row groups small enough to be read one by one."""
    table = pa.Table.from_pylist(list(ocr_prompts(count, seed)))
    pq.write_table(table, path, row_group_size=rows_per_group)
