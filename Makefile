# make demo: a small Qwen-Image learns to spell on this machine, 2 CPU ranks, minutes
# make test: the tests that take no whole runs, minutes; make test ALL=1 adds whole runs and, as root, jobs on a real Slurm
# make lint: ruff and mypy
# make install: only what the two install anyway; settings: PYTHON=python3.12 PIP_ARGS=… ARGS=…
# make demo ENGINE=vllm_omni   the same with the vLLM-Omni engine (2.4 GB more to install); also for install and test
# Both install what they need into .venv first. Paths are relative, so that the checkout may lie in a path with spaces.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The first Python from 3.11 to 3.13; name another with PYTHON=…
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.13 python3.11,\
  $(if $(shell $(p) -c 'import sys; print("yes" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "")' 2>/dev/null),$(p))))
PYTHON_FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
comma := ,
PIP_ARGS ?=
PY := .venv/bin/python
ENGINE ?= diffusers
INSTALLED := .venv/.installed
WITH_ENGINE := $(INSTALLED)$(if $(filter vllm_omni,$(ENGINE)),_vllm_omni)
DEMO := runs/demo
RUN := run$(if $(filter vllm_omni,$(ENGINE)),_vllm_omni)
ARGS ?=

# What a newcomer waits for leaves out whole runs in processes of their own; ARGS="tests/actor" names what to run instead of all.
ALL ?=
FAST := $(if $(ALL),,-m "not slow and not slurm")

.PHONY: help install demo test lint
help:
	@grep -E '^# make' Makefile | sed 's/^# //; s/   make/\nmake/g'

install: $(WITH_ENGINE)
	@echo "installed: .venv/bin/omnirl-hpc"

$(INSTALLED): pyproject.toml constraints/cpu.txt
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c '$(PYTHON_FITS)' 2>/dev/null \
	  || { echo "make: Python 3.11, 3.12 or 3.13 is needed$(if $(PYTHON),$(comma) $(PYTHON) is not one); name it with PYTHON=/path/to/python3.12"; exit 1; }
	@[ ! -x $(PY) ] || $(PY) -c '$(PYTHON_FITS)' || { echo "making .venv anew: it has another Python"; rm -rf .venv; }
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv || { echo "make: $(PYTHON) -m venv failed; on Debian install python3-venv"; exit 1; }
	@echo "installing into .venv: 5 to 10 minutes (tail -f .venv/install.log shows it) …"
	@$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints/cpu.txt -e '.[test]' >.venv/install.log 2>&1 \
	  || { echo "make: pip could not install the packages; is there a network? the end of .venv/install.log says:"; tail -n 3 .venv/install.log; exit 1; }
	@touch $(INSTALLED)

# --no-deps: the list is complete and pinned, and the packages' own requirements ask for CUDA (see the file).
$(INSTALLED)_vllm_omni: $(INSTALLED) constraints/vllm_omni_cpu.txt omnirl_hpc/rollout/vllm_omni/torchvision_stub.py
	@echo "installing vllm-omni into .venv (log: .venv/install.log) …"
	@$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps -r constraints/vllm_omni_cpu.txt >>.venv/install.log 2>&1 \
	  || { echo "make: pip could not install vllm-omni; the end of .venv/install.log says:"; tail -n 3 .venv/install.log; exit 1; }
	@site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  cp omnirl_hpc/rollout/vllm_omni/torchvision_stub.py "$$site/omnirl_torchvision_stub.py"; \
	  echo 'import omnirl_torchvision_stub' >"$$site/omnirl_torchvision_stub.pth"
	@$(PY) -m omnirl_hpc doctor rollout=vllm_omni
	@touch $@

# The same command again goes on with a demo that was stopped; rm -r runs/demo starts over.
demo: $(WITH_ENGINE)
	@mkdir -p $(DEMO)
	@[ -f $(DEMO)/glyph/model_index.json ] || { rm -rf $(DEMO)/glyph; $(PY) -m omnirl_hpc glyph-model $(DEMO)/glyph; }
	@[ -f $(DEMO)/words.parquet ] || $(PY) -m omnirl_hpc prompts $(DEMO)/words.parquet --kind glyph
	@[ -f $(DEMO)/held_out.parquet ] || $(PY) -m omnirl_hpc prompts $(DEMO)/held_out.parquet --kind glyph --held-out
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 -m omnirl_hpc train \
	  recipe=flowgrpo_glyph rollout=$(ENGINE) run_dir=$(DEMO)/$(RUN) model.path=$(DEMO)/glyph \
	  data.prompts=$(DEMO)/words.parquet evaluation.prompts=$(DEMO)/held_out.parquet $(ARGS)

test: $(WITH_ENGINE)
	@$(PY) -m pytest $(FAST) $(ARGS)
	$(if $(ALL),,@echo "whole runs and jobs on Slurm were left out: make test ALL=1 runs them too")

lint: $(INSTALLED)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
