"""Any value of any knob, through Hydra's grammar and OmegaConf's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import omnirl_hpc
from omnirl_hpc.config.load import load_config, load_run_config
from omnirl_hpc.config.quoting import setting

COMMON = Path(omnirl_hpc.__file__).parent.parent / "sbatch/common.sh"

NAMES = (
    *(
        "my run (1)",
        "a=b,c",
        "it's",
        "ünï",
        "{a}",
        "a#b",
        "日本",
        "[a]",
        "a:b;c&d",
        "~/x",
        "-x",
        "  x  ",
        "%j",
    ),
    *(
        "null",
        "true",
        "1_000",
        "1e3",
        "0",
        "`id` $(id) $HOME",
        "*",
        "a\nb\n",
        "\t",
        '"',
        "'\"'",
        'a"b',
        'a\\"b',
    ),
    *("\\", "\\\\", "a\\", "a\\b", "${x}", "\\${x}", "\\\\${x}\\", "$${a}", "${", "a${", '"${"\\'),
)


def read(override: str) -> str:
    """What comes of the only value of a configuration."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    assert parsed.key_or_group == "key" and not parsed.is_sweep_override()
    return OmegaConf.create({"key": parsed.value()}).key


@pytest.mark.parametrize("name", NAMES)
def test_a_name_arrives_as_it_is(name):
    assert read(setting("key", name)) == name


@given(st.text(alphabet=st.sampled_from("\\\"'${}a =,\n"), max_size=8) | st.text(max_size=20))
def test_so_does_any_other(name):
    if name != "???":
        assert read(setting("key", name)) == name


def test_settings_and_groups_take_it_and_a_stored_run_has_it(tmp_path):
    name = "".join(NAMES)
    settings = (setting("recipe", "flowgrpo_tiny"), setting("run_dir", name), setting("model.path", name))
    loaded = load_config([*settings, setting("data.prompts", name)])
    assert loaded.choices["recipe"] == "flowgrpo_tiny"
    config = loaded.config
    assert (config.run_dir, config.model.path, config.data.prompts) == (name, name, name)

    stored = tmp_path / "config.yaml"
    stored.write_text(loaded.to_yaml())
    assert load_run_config(stored, []).config == config


def test_job_scripts_quote_in_the_same_way():
    _, found, rest = COMMON.read_text().partition("\nsetting() {")
    function = found + rest.partition("\n}\n")[0] + "\n}"
    program = f"{function}\nfor name; do setting key \"$name\"; printf '\\0'; done"
    said = subprocess.run(["bash", "-euc", program, "-", *NAMES], capture_output=True, text=True, check=True)
    assert said.stdout.split("\0")[:-1] == [setting("key", name) for name in NAMES]
