"""What importing vllm may leave behind in the process. Needs no vllm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import omnirl_hpc
from omnirl_hpc.errors import EngineError
from omnirl_hpc.rollout.vllm_omni import importing
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


@pytest.mark.parametrize("name", ["vllm", "vllm_omni"])
def test_vllm_that_came_in_another_way_is_an_error(monkeypatch, name):
    monkeypatch.setattr(importing, "_prepared", False)
    monkeypatch.setattr(importing, "require", lambda: None)
    for other in {"vllm", "vllm_omni"} - {name}:
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, name, object())
    with pytest.raises(EngineError, match=f"^{name} was imported before import_vllm_omni"):
        importing.import_vllm_omni(torch.device("cpu"))


@pytest.mark.parametrize("options", [[], ["--profile"]])
def test_the_benchmark_of_steps_leaves_vllm_to_the_engine(tmp_path, options):
    """Also where it deletes weights, for which it reaches into the engine before there is one."""
    root = Path(omnirl_hpc.__file__).parent.parent
    program = f"""
import sys
from benchmarks import rl_step
rl_step.delete_weights_when_read(rl_step.Path({str(tmp_path)!r}))
if {bool(options)}:
    rl_step.profile_update(number=3)
print(sorted({{"vllm", "vllm_omni"}} & set(sys.modules)))
"""
    environ = {"PYTHONPATH": ":".join([str(root), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
