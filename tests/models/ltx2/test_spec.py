"""LTX-2.3 is told from its relatives. Expected values: diffusers' script that converts Lightricks' files."""

from __future__ import annotations

import json

from omnirl_hpc.checks.supported import find_unsupported
from omnirl_hpc.models.ltx2.shape import PUBLISHED
from omnirl_hpc.models.ltx2.spec import SPEC
from tests.stand_ins import write_descriptions_of


def test_the_published_transformer_is_accepted_and_that_of_2_0_refused_by_name(tmp_path):
    write_descriptions_of(SPEC, tmp_path)
    network, index = tmp_path / "transformer/config.json", tmp_path / "model_index.json"
    settings = {"_class_name": "LTX2VideoTransformer3DModel", **PUBLISHED}
    network.write_text(json.dumps(settings))
    assert find_unsupported(tmp_path, SPEC) == []
    network.write_text(json.dumps(settings | {"gated_attn": False, "use_prompt_embeddings": True}))
    index.write_text(json.dumps(json.loads(index.read_text()) | {"vocoder": ["ltx2", "LTX2Vocoder"]}))
    assert find_unsupported(tmp_path, SPEC) == [
        "transformer/config.json sets gated_attn=false, not true",
        "transformer/config.json sets use_prompt_embeddings=true, not false",
        "model_index.json names LTX2Vocoder as vocoder, not LTX2VocoderWithBWE",
    ] + [
        "vocoder/config.json is of LTX2VocoderWithBWE, model_index.json names LTX2Vocoder",
    ]
