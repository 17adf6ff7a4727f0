"""How a rule refuses a class."""

from __future__ import annotations

from omnirl_hpc.config.classes import built_in, find_class, is_import_path
from omnirl_hpc.errors import one_of


def require_class(group: str, key: str, name: str) -> None:
    """Raise ConfigError where there is no such class. One of the user's own is imported for this; ours are
    not.
    """
    if is_import_path(name):
        find_class(group, name)
    else:
        one_of(key, name, (*built_in(group), "your own as module:Class"))
