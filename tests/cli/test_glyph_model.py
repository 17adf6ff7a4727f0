"""`omnirl-hpc glyph-model` and its prompts."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from diffusers import QwenImagePipeline

from omnirl_hpc.cli.main import main
from omnirl_hpc.cli.prompts import run as prompts
from omnirl_hpc.data.glyph_words import HELD_OUT, TRAINING


def test_the_model_is_a_checkpoint_in_the_layout_of_diffusers(tmp_path, capsys):
    main(["glyph-model", str(tmp_path / "glyph")])
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "glyph")
    assert pipeline.transformer.config.num_layers == 5
    with pytest.raises(SystemExit):
        main(["glyph-model", str(tmp_path / "glyph")])
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "words"), [((), TRAINING), (("--held-out",), HELD_OUT)])
def test_prompts_for_it(tmp_path, options, words):
    prompts([str(tmp_path / "words.parquet"), "--kind", "glyph", *options])
    table = pq.read_table(tmp_path / "words.parquet")
    assert table["target"].to_pylist() == words
    assert table["prompt"][0].as_py() == f'the word "{words[0]}"'
    prompts(["--check", str(tmp_path / "words.parquet")])


def test_the_words_are_not_counted(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prompts([str(tmp_path / "words.parquet"), "--kind", "glyph", "--count", "3"])
    assert "say what to do" in capsys.readouterr().err
