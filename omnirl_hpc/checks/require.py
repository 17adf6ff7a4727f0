"""How rules refuse a class or an adapter."""

from __future__ import annotations

from pathlib import Path

from omnirl_hpc.checkpoints.adapters import PEFT_FILE, adapter_file, read_adapter_config
from omnirl_hpc.config.classes import built_in, find_class, is_import_path
from omnirl_hpc.config.schema import LoraConfig
from omnirl_hpc.errors import ConfigError, one_of, require


def require_class(group: str, key: str, name: str) -> None:
    """Raise ConfigError where there is no such class. One of the user's own is imported for this; ours are
    not.
    """
    if is_import_path(name):
        find_class(group, name)
    else:
        one_of(key, name, (*built_in(group), "your own as module:Class"))


def require_adapter(key: str, adapter: str, lora: LoraConfig) -> None:
    """Raise ConfigError where the adapter that `key` names is none, or of another rank."""
    require(
        adapter_file(Path(adapter)) is not None,
        f"{key}={adapter} is not an adapter: {adapter}/{PEFT_FILE} does not exist",
    )
    try:
        rank = read_adapter_config(Path(adapter), assumed=lora)["r"]
    except ConfigError as error:
        raise ConfigError(f"{key}={adapter}: {error}") from None
    require(
        rank == lora.rank,
        f"{key}={adapter} has rank {rank}, and actor.lora.rank={lora.rank}: set actor.lora.rank={rank}",
    )
