"""residency=auto takes what fits."""

from __future__ import annotations

from omnirl_hpc.planning.estimate import estimate
from omnirl_hpc.planning.gpus import GIB
from omnirl_hpc.planning.residency import choose_residency
from tests.planning.cases import full_size


def test_both_stay_where_both_fit():
    config, layout = full_size("residency=auto", ranks=8)
    needed = estimate(*full_size("residency=resident", ranks=8)).gpu_bytes
    assert choose_residency(config, layout, needed / 0.89)[0] == "resident"
    residency, why = choose_residency(config, layout, needed / 0.91)  # a tenth is kept free
    assert residency == "swap"
    assert f"both together would need {needed / GIB:.0f} of" in why


def test_one_h100_swaps_and_eight_h200_do_not():
    """One copy of the actor's base is 38 GiB; of eight shards each is 5."""
    memory = 140.4 * GIB
    assert choose_residency(*full_size("residency=auto"), 79.6 * GIB)[0] == "swap"
    assert choose_residency(*full_size("residency=auto", ranks=8), memory)[0] == "resident"


def test_longer_prompts_need_more():
    config, layout = full_size("residency=auto", ranks=8)
    needed = estimate(*full_size("residency=resident", ranks=8), text_width=1024).gpu_bytes
    assert choose_residency(config, layout, needed / 0.91)[0] == "resident"
    residency, why = choose_residency(config, layout, needed / 0.91, text_width=1024)
    assert residency == "swap" and "with 1024 text tokens" in why


def test_where_nothing_fits_it_says_so():
    residency, why = choose_residency(*full_size("residency=auto"), 40 * GIB)
    assert residency == "swap" and why.startswith("neither fits")
