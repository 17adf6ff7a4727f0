"""`omnirl-hpc export`: plain diffusers makes of it the images that `evaluate` makes. Runs in every state."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file

from omnirl_hpc.checkpoints.adapters import load_adapter, read_adapter_config, scale
from omnirl_hpc.cli.main import main
from omnirl_hpc.data.prompts import PromptTable
from omnirl_hpc.evaluation.evaluator import NO_STEP
from omnirl_hpc.models.qwen_image.family import QwenImage
from omnirl_hpc.sampling.noise import INITIAL_NOISE, standard_normal
from omnirl_hpc.sampling.streams import LATENTS
from tests.cli.run_states import make_state
from tests.helpers import fill_adapter

STEPS, SHAPE = 5, (6, 16)  # of the evaluation in finished_run; latents of 32 x 48 pixels


def plain_latents(pipeline: QwenImagePipeline, prompts) -> torch.Tensor:
    """What the stock pipeline makes of prompts, one at a time, from the noise that evaluations use; clean
    latents.
    """
    made = []
    for prompt in prompts:
        made.append(
            pipeline(
                prompt=prompt.prompt,
                negative_prompt=" ",
                true_cfg_scale=4.0,
                height=32,
                width=48,
                num_inference_steps=STEPS,
                latents=standard_normal(SHAPE, 0, INITIAL_NOISE, NO_STEP, prompt.id, 0)[None],
                max_sequence_length=1024,
                output_type="latent",
            ).images
        )
    return torch.cat(made)


@pytest.fixture(scope="module")
def strong(finished_run, tmp_path_factory):
    """The finished run with an adapter that matters in its last checkpoint: three steps change images by less
    than a grey level.
    """
    from omnirl_hpc.checkpoints.adapters import read_adapter_config, save_adapter
    from omnirl_hpc.checkpoints.files import crc
    from omnirl_hpc.config.schema import LoraConfig
    from omnirl_hpc.models.lora import add_lora, lora_parameters

    run = tmp_path_factory.mktemp("strong") / "run"
    shutil.copytree(finished_run, run)
    checkpoint = run / "checkpoints/step_000003"
    settings = read_adapter_config(checkpoint / "adapter")
    model = (
        json.loads((run / "checkpoints/step_000003/state.json").read_text())["config"]
        .split("path: ")[1]
        .split()[0]
    )
    transformer = QwenImageTransformer2DModel.from_pretrained(model, subfolder="transformer")
    add_lora(
        transformer,
        LoraConfig(settings["r"], settings["lora_alpha"]),
        QwenImage.spec.lora_targets,
        torch.float32,
        seed=0,
    )
    for seed, folder in enumerate(("adapter", "ema")):
        fill_adapter(transformer, seed=seed)
        save_adapter(
            checkpoint / folder, {name: p.data for name, p in lora_parameters(transformer).items()}, settings
        )
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest = {name: [(checkpoint / name).stat().st_size, crc(checkpoint / name)] for name in manifest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return run


@pytest.fixture(scope="module")
def evaluated(strong, tmp_path_factory):
    """`omnirl-hpc evaluate` of it: the folder, and the clean latents of base, ema and adapter."""
    out, latents, decode = tmp_path_factory.mktemp("evaluated"), [], QwenImage.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            QwenImage, "decode", lambda self, vae, x: latents.append(x[LATENTS]) or decode(self, vae, x)
        )
        main(["evaluate", str(strong), str(out)])
    assert len(latents) == 3  # one micro-batch of two samples each
    return out, dict(zip(("base", "ema", "adapter"), latents))


@pytest.fixture(scope="module")
def prompts(tiny_prompts):
    return PromptTable(tiny_prompts).first(2)


@pytest.mark.parametrize(("policy", "options"), [("adapter", ()), ("ema", ("--policy", "ema"))])
def test_plain_diffusers_makes_the_images_of_evaluate(
    strong, evaluated, tiny_model, prompts, tmp_path, policy, options
):
    main(["export", str(strong), str(tmp_path / "out"), *options])
    folder, latents = evaluated
    pipeline = QwenImagePipeline.from_pretrained(tiny_model)
    torch.testing.assert_close(plain_latents(pipeline, prompts), latents["base"], rtol=0, atol=1e-5)
    pipeline.load_lora_weights(tmp_path / "out")
    plain = plain_latents(pipeline, prompts)
    torch.testing.assert_close(plain, latents[policy], rtol=0, atol=1e-5)
    pipeline.unload_lora_weights()  # and as tools do that know nothing of the file's header
    pipeline.load_lora_weights(load_file(tmp_path / "out/pytorch_lora_weights.safetensors"))
    assert torch.equal(plain_latents(pipeline, prompts), plain)
    assert (plain - latents["base"]).abs().max() > 0.1  # the adapter matters
    images = QwenImage.decode(_family(tiny_model), pipeline, {LATENTS: plain}).frames[:, 0]
    for image, name in zip(images, ("0000_00.png", "0001_00.png")):
        saved = np.asarray(Image.open(folder / "step_000003" / policy / name)).astype(int)
        assert (
            np.abs(saved - image.permute(1, 2, 0).numpy()).max() <= 1
        )  # grey levels: rounding may fall either way


def test_merged_is_the_adapter(strong, evaluated, tiny_model, prompts, tmp_path):
    main(["export", str(strong), str(tmp_path / "merged"), "--merge"])
    transformer = QwenImageTransformer2DModel.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in transformer.named_parameters())
    pipeline = QwenImagePipeline.from_pretrained(tiny_model, transformer=transformer)
    torch.testing.assert_close(plain_latents(pipeline, prompts), evaluated[1]["adapter"], rtol=0, atol=1e-5)


def _family(model):
    from omnirl_hpc.config.schema import ModelConfig

    return QwenImage(ModelConfig(path=str(model), height=32, width=48))


def test_an_exported_adapter_can_be_evaluated_itself(strong, evaluated, tiny_model, tiny_prompts, tmp_path):
    main(["export", str(strong), str(tmp_path / "out")])
    given = (f"model.path={tiny_model}", f"data.prompts={tiny_prompts}", "model.height=32", "model.width=48")
    sizes = (
        "evaluation.num_prompts=2",
        f"evaluation.num_inference_steps={STEPS}",
        "rollout.micro_batch_size=2",
    )
    main(["evaluate", str(tmp_path / "out"), str(tmp_path / "e"), "recipe=flowgrpo_tiny", *given, *sizes])
    for name in ("0000_00.png", "0001_00.png"):
        ours, theirs = tmp_path / "e/step_000000/adapter" / name, evaluated[0] / "step_000003/adapter" / name
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(("state", "step"), [("finished", 3), ("running", None), ("torn", None)])
def test_states_of_a_run(finished_run, tmp_path, capsys, state, step):
    """Running and torn: checkpoint 3 is not whole, and the one before is taken."""
    run = make_state(state, finished_run, tmp_path)
    before = max(
        int(p.name[5:]) for p in (finished_run / "checkpoints").glob("step_*") if p.name != "step_000003"
    )
    main(["export", str(run), str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said == (
        f"wrote the adapter of the policy current after {step or before} steps: "
        f"pipeline.load_lora_weights('{tmp_path / 'out'}')\n"
    )
    exported, saved = (
        load_adapter(tmp_path / "out"),
        load_adapter(finished_run / f"checkpoints/step_{step or before:06d}/adapter"),
    )
    settings = read_adapter_config(finished_run / f"checkpoints/step_{step or before:06d}/adapter")
    saved = scale(saved, settings["lora_alpha"] / settings["r"])
    assert settings["lora_alpha"] == 4 * settings["r"]  # in the weights it matters
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)


def test_every_file_follows_the_umask(finished_run, strong, tmp_path):
    """Of a run, of an export and of merged weights: none is closed to those who may read the others."""
    main(["export", str(strong), str(tmp_path / "merged"), "--merge"])
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    files = [path for folder in (finished_run, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert {path.name: oct(path.stat().st_mode) for path in files if path.stat().st_mode != usual} == {}
    assert sum(path.suffix == ".safetensors" for path in files) >= 3


@pytest.mark.parametrize(
    ("state", "options", "said"),
    [
        ("empty", (), "is not the folder of a run: it has no config.yaml"),
        ("missing", (), "does not exist"),
        ("started", (), "checkpoints has no whole checkpoint"),
        ("torn", ("--step", "3"), "step_000003 has "),
        ("finished", ("--step", "1"), "step_000001 does not exist; whole steps: ["),
        (
            "finished",
            ("--merge", "--model", "/nowhere"),
            "--merge needs the model, and model.path=/nowhere is none",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(finished_run, tmp_path, capsys, state, options, said):
    with pytest.raises(SystemExit) as ended:
        main(["export", str(make_state(state, finished_run, tmp_path)), str(tmp_path / "out"), *options])
    assert ended.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("omnirl-hpc export: ") and said in line
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.tmp"))


def test_classes_of_ones_own_are_not_needed(finished_run, tmp_path, capsys):
    """Neither by export, whose adapter they had a part in, nor by those that read files alone."""
    run = make_state("finished", finished_run, tmp_path)
    settings = (run / "config.yaml").read_text()
    for ours, theirs in (
        ("name: flow_grpo", "name: gone:Algorithm\n  keep: 0.5"),
        ("      name: jpeg_compressibility", "      name: gone:Mine\n      level: 0.5"),
        ("family: qwen_image", "family: gone:Family"),
    ):
        assert settings.count(ours) == 1
        settings = settings.replace(ours, theirs)
    (run / "config.yaml").write_text(settings)
    main(["status", str(run)])
    main(["report", str(run), "--out", str(tmp_path / "r.html")])
    main(["export", str(run), str(tmp_path / "out")])
    assert "wrote the adapter of the policy current after 3 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["export", str(run), str(tmp_path / "merged"), "--merge"])
    assert "model=gone:Family: there is no module gone" in capsys.readouterr().err


def test_the_best_one_of_a_run_without_evaluations(finished_run, tmp_path, capsys):
    run = make_state("finished", finished_run, tmp_path)
    (run / "checkpoints/best").unlink()
    with pytest.raises(SystemExit):
        main(["export", str(run), str(tmp_path / "out"), "--step", "best"])
    assert "checkpoints has none: a run that sets evaluation.every (and not " in capsys.readouterr().err


def test_nothing_is_overwritten(finished_run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit):
        main(["export", str(finished_run), str(tmp_path / "out")])
    assert "exists: delete it or choose another name" in capsys.readouterr().err


def test_the_best_one(finished_run, tmp_path, capsys):
    main(["export", str(finished_run), str(tmp_path / "out"), "--step", "best"])
    best = int((finished_run / "checkpoints/best").read_text().removeprefix("step_"))
    assert f"wrote the adapter of the policy current after {best} steps" in capsys.readouterr().out
