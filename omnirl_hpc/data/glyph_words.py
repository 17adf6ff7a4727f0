"""The words that Glyph is asked for, in two lists that share none, and the prompts that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

PROMPT = 'the word "{word}"'
# Glyph's pretraining never saw these: they are for evaluations.
HELD_OUT = (
    "ARM BEE CAKE CLUB CROW DESK DRUM EAST FISH FLAG FOX FROG GATE GOAT HAND HARP ICE INK JAZZ JUMP "
    "KING KITE LAMP LEAF MAP MOON NEST NINE OAK OVEN PARK PIG QUIZ RAIN ROSE SAND SHIP SNOW STAR TEN "
    "TREE TWIG VASE VINE WAVE WOLF YARD ZOO"
).split()
TRAINING = (
    "ANT APE ARCH AUNT BABY BACK BALL BAND BANK BARN BAT BEAR BELL BIKE BIRD BLUE BOAT BONE BOOK BOX "
    "BUS BYTE CAMP CAR CARD CAT CAVE CITY CLAY COAT COLD CORN COW CUP DAWN DEER DICE DISH DOG DOOR DOVE "
    "DUCK DUST EAR EGG ELK EXIT EYE FACE FAN FARM FERN FIRE FIVE FLY FOOD FOUR FUEL GAME GIFT GOLD GRID "
    "GULF GUM HAT HAWK HEN HILL HOME HOOK HOUR IDEA IRON ISLE JAM JAR JET JOB JOKE JURY KEY KID KNOT "
    "LAKE LAND LAW LEG LIME LION LOCK LOG LUCK MAIL MASK MAZE MEAL MICE MILK MINT MOSS MUD NAIL NAVY "
    "NET NODE NOON NOSE NUT OATS OIL ONE ONYX OPAL OWL PAN PATH PEA PEN PINE PLUM POND PUMA QUAY RAFT "
    "RED RICE RING ROAD ROOF ROOT RUBY SAIL SALT SEA SEED SHOE SILK SIX SKY SOAP SONG SOUP SUN SWAN "
    "TAXI TEA TENT TIDE TIN TOY TUBA TWO UNIT URN VAN VEST VIEW WALL WAX WEB WELL WEST WIND WING WOOD "
    "WOOL YAK YARN YEAR ZERO ZINC ZONE"
).split()


def glyph_prompts(held_out: bool) -> Iterator[dict[str, str]]:
    """Rows with the columns prompt, target and id."""
    for word in HELD_OUT if held_out else TRAINING:
        yield {"id": f"glyph-{word.lower()}", "prompt": PROMPT.format(word=word), "target": word}


def write_glyph_table(path: str, held_out: bool) -> None:
    """Write `glyph_prompts` as a parquet table."""
    pq.write_table(pa.Table.from_pylist(list(glyph_prompts(held_out))), path)
