"""Checkpoints of earlier versions."""

from __future__ import annotations

from omnirl_hpc.checkpoints.run_state import _source_state


def test_what_version_0_1_0_kept_of_the_source_is_found():
    """There it lay beside the rest."""
    earlier = {"step": 3, "cursor": 12, "prompts": "ab", "micro_batch_size": 2, "algorithm": {}}
    found = _source_state(earlier)
    assert {key: found[key] for key in ("cursor", "prompts", "micro_batch_size")} == {
        "cursor": 12,
        "prompts": "ab",
        "micro_batch_size": 2,
    }
    assert _source_state({"step": 3, "source": {"cursor": 4, "prompts": "ab"}}) == {
        "cursor": 4,
        "prompts": "ab",
    }
