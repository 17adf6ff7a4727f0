"""What importing vllm may leave behind in the process. Needs no vllm."""

from __future__ import annotations

import os

import torch

from omnirl_hpc.rollout.vllm_omni.importing import keep_environment, keep_torch_settings


def test_keep_environment_puts_back_all_but_the_listed(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GONE", "x")
    monkeypatch.delenv("NEW", raising=False)
    monkeypatch.delenv("LISTED", raising=False)
    with keep_environment(but=frozenset({"LISTED"})):
        os.environ.update({"RANK": "0", "NEW": "1", "LISTED": "1"})
        del os.environ["GONE"]
    assert (os.environ["RANK"], os.environ["GONE"], os.environ.get("NEW"), os.environ["LISTED"]) == (
        "3",
        "x",
        None,
        "1",
    )
    monkeypatch.delenv("LISTED")


def test_keep_torch_settings_puts_back_what_an_import_turned_off():
    switches = torch.backends.cuda
    before = switches.cudnn_sdp_enabled(), switches.math_sdp_enabled(), torch.get_default_dtype()
    with keep_torch_settings():
        switches.enable_cudnn_sdp(not before[0])  # vllm/platforms/cuda.py does so at its import
        switches.enable_math_sdp(not before[1])
        torch.set_default_dtype(torch.float64)
    assert (switches.cudnn_sdp_enabled(), switches.math_sdp_enabled(), torch.get_default_dtype()) == before
