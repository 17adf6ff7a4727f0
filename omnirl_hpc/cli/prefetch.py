"""`omnirl-hpc prefetch recipe=NAME model.path=DIR`: fetch on a login node what offline nodes need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from omnirl_hpc.checks.preflight.model_files import find_problems
from omnirl_hpc.checks.supported import find_unsupported
from omnirl_hpc.config.load import load_config
from omnirl_hpc.errors import ConfigError, FetchError
from omnirl_hpc.models.spec import find_spec

USAGE = """usage: omnirl-hpc prefetch recipe=NAME model.path=DIR [model.repo=ORGANISATION/NAME]

On a login node: fetches the recipe's model (model.repo) from the hub into the folder model.path, and checks
that its family can train it and that it is complete. What is already there is kept; an interrupted download
goes on. HF_TOKEN, HF_ENDPOINT and proxies are huggingface_hub's.
"""
# What says which kind of checkpoint it is, before the weights, which take an hour
DESCRIPTIONS = ("model_index.json", "*/config.json", "*/scheduler_config.json")
UNUSED = ("run_dir=-", "data.prompts=-")


def run(arguments: Sequence[str]) -> None:
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(USAGE, end="")
        return
    loaded = load_config([*UNUSED, *arguments], unused=("algorithm",))
    model, recipe = loaded.config.model, loaded.choices["recipe"]
    if model.repo is None:
        raise ConfigError(
            f"recipe={recipe} names no repository of a model: add model.repo=ORGANISATION/NAME (the tiny "
            "model is made, not "
            "fetched: omnirl-hpc tiny-model)"
        )
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("0", "OFF", "NO", "FALSE", ""):
        raise ConfigError(
            f"HF_HUB_OFFLINE={os.environ['HF_HUB_OFFLINE']} forbids downloads: unset it on the login node"
        )
    folder = Path(model.path)
    commit = fetch(model.repo, folder, DESCRIPTIONS)
    if unsupported := find_unsupported(folder, spec := find_spec(model.family)):
        raise ConfigError(
            f"model.repo={model.repo} is not a checkpoint that model.family={model.family} ({spec.title}) "
            "can "
            f"train: {'; '.join(unsupported)}; its weights are not fetched"
        )
    fetch(model.repo, folder)
    if problems := find_problems(folder):
        raise FetchError(
            f"{model.repo} in model.path={folder} is not complete: {'; '.join(problems)}; the same command "
            "goes on"
        )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{model.repo} (commit {commit}) is complete in {folder}, {size / 1e9:.1f} GB. On the nodes:")
    print(
        f"  RECIPE={recipe} MODEL={folder.resolve()} PROMPTS=TABLE.parquet sbatch "
        "sbatch/flowgrpo_qwen_image.sh"
    )
    print(
        f"  srun omnirl-hpc doctor recipe={recipe} model.path={folder.resolve()}     # tests it there first"
    )


def fetch(repo: str, folder: Path, patterns: Sequence[str] | None = None) -> str:
    """The files of a repository (all, or those of `patterns`) into `folder`; returns the commit.

    Raises FetchError, ConfigError for a wrong model.repo.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        commit = (
            HfApi().model_info(repo).sha
        )  # without a network, snapshot_download is content with what is there
        snapshot_download(
            repo,
            revision=commit,
            local_dir=folder,
            allow_patterns=None if patterns is None else list(patterns),
        )
    except HFValidationError as error:
        raise ConfigError(f"model.repo={repo} is not a repository's name: {_line(error)}") from None
    except GatedRepoError:
        raise ConfigError(
            f"model.repo={repo} is gated: accept its terms on the hub, then set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"model.repo={repo} does not exist on the hub, or is private: see the name, or set HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, httpx.TransportError) as error:
        raise FetchError(
            f"the hub cannot be reached ({_line(error.__cause__ or error)}): run this where there is a "
            "network (a login node), "
            "or set HTTPS_PROXY or HF_ENDPOINT; the same command goes on with what is there"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise FetchError(
            f"{repo} could not be fetched into {folder}: {_line(error)}; the same command goes on"
        ) from None
    assert commit is not None  # of a repository that was found
    return commit


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
