"""Makes Glyph from nothing, in minutes on one GPU: pictures of words, an autoencoder, a denoiser.

    pip install font-roboto font-lato font-source-sans-pro font-source-serif-pro font-caladea font-manrope \\
        font-fredoka-one font-fjallaone
    python benchmarks/pretrain_glyph.py OUT

writes OUT/glyph.safetensors (the first checkpoint whose score reaches --score, or the last one), which the
package ships as omnirl_hpc/models/qwen_image/glyph.safetensors; the autoencoder, a checkpoint of the denoiser
every --every seconds, OUT/log.jsonl, and pictures. Every stage stops after its seconds, so results depend on
the machine: command, seed and scores of the shipped file are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageRMS_norm, QwenImageUpsample
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.glyph_images import (
    draw_mask,
    edges,
    font_files,
    letter_weights,
    make_masks,
    paint,
    random_word,
)
from omnirl_hpc.data.glyph_words import HELD_OUT, PROMPT, TRAINING
from omnirl_hpc.models.qwen_image.family import PROMPT_TEMPLATE, TEMPLATE_START
from omnirl_hpc.models.qwen_image.glyph import (
    WORDS,
    GlyphSize,
    frame_convolutions,
    make_text_encoder,
    make_transformer,
    make_vae,
    pack,
)
from omnirl_hpc.models.qwen_image.tiny import SCHEDULER, byte_tokenizer
from omnirl_hpc.rewards.ocr import Ocr, OcrConfig, similarity
from omnirl_hpc.sampling.schedule import make_schedule

# glyph-large is for studies on GPUs and not shipped.
SIZES = {
    "glyph": GlyphSize(),
    "glyph-large": GlyphSize(
        height=64, width=128, text_width=256, heads=24, layers=4, vae_width=32, latent_channels=16
    ),
}
WARMUP = 300  # updates
EMA_DECAY = 0.999
FIRST_LOG_VARIANCE = -5.0  # of the autoencoder's latents
PAINTINGS = 2  # of each mask, encoded before the denoiser's training starts
UNPROMPTED = 0.1  # of the denoiser's batches, which guidance needs
KL_WEIGHT = 1e-3
GUIDANCE = (1.0, 3.0)
STEPS = 10  # of sampling


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="glyph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--masks", type=int, default=300_000, help="words drawn before training starts")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--autoencoder", type=Path, help="a file of an earlier run: skip that stage")
    parser.add_argument("--autoencoder-seconds", type=float, default=240)
    parser.add_argument("--denoiser-seconds", type=float, default=240)
    parser.add_argument("--every", type=float, default=30, help="seconds between scores and checkpoints")
    parser.add_argument(
        "--batch", type=int, default=1024, help="of the denoiser; the autoencoder takes a quarter"
    )
    parser.add_argument(
        "--score", type=float, default=0.45, help="the checkpoint to take: the first that reaches it"
    )
    parser.add_argument("--vae-width", type=int)
    parser.add_argument("--vae-multipliers", type=int, nargs=4)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kl", type=float, default=KL_WEIGHT)
    options = parser.parse_args()
    Pretraining(options).run()


def chosen_size(options: argparse.Namespace) -> GlyphSize:
    shape = dict(vars(SIZES[options.size]))
    for name in ("vae_width", "vae_multipliers", "layers", "heads"):
        if getattr(options, name) is not None:
            shape[name] = getattr(options, name)
    return GlyphSize(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in shape.items()}
    )


class Reader:
    """Scores pictures with the recipe's reward, in processes."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_make_ocr)
        self._pool.map(
            _recognise, np.zeros((processes, 32, 64, 3), np.uint8)
        )  # starts while other work goes on

    def texts(self, pictures: Tensor) -> list[str]:
        """Of pictures [B, 3, H, W] in [-1, 1]."""
        return list(self._pool.map(_recognise, as_bytes(pictures), chunksize=4))

    def score(self, pictures: Tensor, words: list[str]) -> float:
        return sum(map(similarity, self.texts(pictures), words)) / len(words)


def _make_ocr() -> None:
    global _ocr
    _ocr = Ocr(OcrConfig(detect=False))


def _recognise(picture: np.ndarray) -> str:
    return _ocr.recognise(picture)


def as_bytes(pictures: Tensor) -> np.ndarray:
    """[B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8."""
    return (pictures.float() / 2 + 0.5).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def save_sheet(path: Path, pictures: Tensor, columns: int = 8, scale: int = 3) -> None:
    rows = [
        np.concatenate(list(row), 1) for row in np.array_split(as_bytes(pictures), len(pictures) // columns)
    ]
    sheet = Image.fromarray(np.concatenate(rows))
    sheet.resize((sheet.width * scale, sheet.height * scale), Image.Resampling.LANCZOS).save(path)


class Updates:
    """Calls `step(*inputs) -> losses` and counts; on a GPU as a captured graph, one for each set of shapes.

    `step` must be one whole update, its optimizer's step included, and read nothing back from the device.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        self._step, self._device = step, device
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return self._step(*inputs)
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._graphs:
            self._graphs[shapes] = self._capture(inputs)
        graph, places, losses = self._graphs[shapes]
        for place, tensor in zip(places, inputs):
            place.copy_(tensor)
        graph.replay()
        return losses

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        places = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # makes kernels, optimizer states and caches
                self._step(*places)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = self._step(*places)
        return graph, places, losses


@dataclass
class Learner:
    """AdamW with a warm-up and a cosine decay over the stage's seconds, and a running mean of the weights."""

    module: nn.Module
    rate: float
    device: torch.device
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.lr = torch.zeros((), device=self.device)
        cuda = self.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.lr if cuda else 0.0,
            betas=(0.9, 0.99),
            weight_decay=self.weight_decay,
            capturable=cuda,
            foreach=True,
        )
        self.mean = copy.deepcopy(self.module).requires_grad_(False)
        self._means = [
            mean
            for mean, parameter in zip(self.mean.parameters(), self.module.parameters())
            if parameter.requires_grad
        ]

    def schedule(self, update: int, done: float) -> None:
        """Before an update; `done` is the fraction of the stage's time."""
        rate = (
            self.rate * min(1, (update + 1) / WARMUP) * (0.02 + 0.98 * math.cos(min(done, 1) * math.pi / 2))
        )
        self.lr.fill_(rate)
        if self.device.type != "cuda":
            self._optimizer.param_groups[0]["lr"] = rate

    def update(self, loss: Tensor) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self._optimizer.step()
        torch._foreach_lerp_(self._means, [p.detach() for p in self.parameters], 1 - EMA_DECAY)


def as_pictures(vae: nn.Module) -> None:
    """Compute the same with a fraction of the work: the causal convolutions of one frame as convolutions of
    pictures (so that frames before the first get no gradient), norms as one kernel each.
    """
    for conv in frame_convolutions(vae).values():

        def convolve(x: Tensor, conv: nn.Module = conv) -> Tensor:
            padding = (conv._padding[2], conv._padding[0])
            return functional.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=padding).unsqueeze(
                2
            )

        conv.forward = convolve
    for module in vae.modules():
        if isinstance(module, QwenImageRMS_norm):

            def norm(x: Tensor, module: nn.Module = module) -> Tensor:
                with torch.autocast(x.device.type, enabled=False):
                    gamma = module.gamma.flatten().to(x.dtype)
                    return functional.rms_norm(x.movedim(1, -1), gamma.shape, gamma, eps=1e-12).movedim(-1, 1)

            module.forward = norm
        elif isinstance(module, QwenImageUpsample):
            module.forward = partial(functional.interpolate, scale_factor=2.0, mode="nearest-exact")


def embed(encoder: nn.Module, prompts: list[str], device: torch.device, batch: int = 8192) -> Tensor:
    """[B, T, D] embeddings of prompts that have equally many tokens, as the pipeline makes them."""
    tokenizer = byte_tokenizer(WORDS)
    rows = []
    for start in range(0, len(prompts), batch):
        texts = [PROMPT_TEMPLATE.format(prompt) for prompt in prompts[start : start + batch]]
        ids = torch.tensor(tokenizer(texts)["input_ids"], device=device)
        output = encoder(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        rows.append(output.hidden_states[-1][:, TEMPLATE_START:])
    return torch.cat(rows)


def probe(encoder: nn.Module, device: torch.device, count: int = 4000) -> float:
    """The fraction of letters in unseen words that a linear map reads from a prompt's embeddings at their
    places.
    """
    draw = random.Random(1)
    words = [random_word(draw, lengths=(4,)) for _ in range(2 * count)]
    features = embed(encoder, [PROMPT.format(word=word) for word in words], device).float().flatten(1)
    features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    letters = torch.tensor([[ord(letter) - 65 for letter in word] for word in words], device=device)
    targets = functional.one_hot(letters, 26).float().flatten(1)
    known, unseen = features[:count], features[count:]
    gram = known.T @ known + 1e-2 * torch.eye(known.shape[1], device=device)
    read = (unseen @ torch.linalg.solve(gram, known.T @ targets[:count])).view(count, 4, 26).argmax(-1)
    return float((read == letters[count:]).float().mean())


class Pretraining:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, chosen_size(options)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.reader = Reader(options.processes)
        options.out.mkdir(parents=True, exist_ok=True)
        self.encoder = make_text_encoder(self.size, seed=0).to(self.device)
        self.started = time.monotonic()

    def log(self, **facts: object) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - self.started, 1), **facts})
        print(line, flush=True)
        with (self.options.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False
        )

    def run(self) -> None:
        options, size = self.options, self.size
        self.log(
            command=vars(options) | {"out": str(options.out), "autoencoder": str(options.autoencoder)},
            torch=torch.__version__,
            python=platform.python_version(),
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        )
        with torch.no_grad():
            self.log(stage="text encoder", letters_read_by_a_linear_probe=probe(self.encoder, self.device))
        words, masks = make_masks(
            options.masks, size.height, size.width, frozenset(HELD_OUT), options.seed, options.processes
        )
        self.words, self.masks = words, torch.from_numpy(masks).to(self.device)
        self.log(stage="masks", count=len(words))
        self.truth()
        if options.autoencoder:
            vae = make_vae(size)
            vae.load_state_dict(torch.load(options.autoencoder, map_location="cpu", weights_only=True))
            vae.to(self.device).eval().requires_grad_(False)
            as_pictures(vae)
        else:
            vae = self.train_autoencoder()
        self.train_denoiser(vae)

    def truth(self) -> None:
        """How well the reward reads what pretraining shows: rendered held-out words."""
        draw = random.Random(self.options.seed)
        self.shown_words = [draw.choice(HELD_OUT) for _ in range(256)]
        fonts = font_files()
        masks = np.stack(
            [draw_mask(word, self.size.height, self.size.width, fonts, draw) for word in self.shown_words]
        )
        generator = torch.Generator(self.device).manual_seed(1)
        self.shown = paint(torch.from_numpy(masks).to(self.device), generator)
        self.log(stage="truth", ocr=self.reader.score(self.shown, self.shown_words))
        save_sheet(self.options.out / "truth.png", self.shown[:64])

    def batches(self, seconds: float) -> Iterator[tuple[int, float]]:
        """(update, fraction of the time) until the time is over."""
        start, update = time.monotonic(), 0
        while (done := (time.monotonic() - start) / max(seconds, 1e-9)) < 1:
            yield update, done
            update += 1
            if update % 50 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()

    def train_autoencoder(self) -> nn.Module:
        options, device = self.options, self.device
        vae = make_vae(self.size).to(device)
        as_pictures(vae)
        with torch.no_grad():  # starts with little noise in its latents
            vae.quant_conv.bias[self.size.latent_channels :] = FIRST_LOG_VARIANCE
        learner = Learner(vae, rate=2e-3, device=device, weight_decay=0.0)
        as_pictures(learner.mean)  # the copy's own convolutions

        def step(masks: Tensor) -> Tensor:
            pictures, weights = paint(masks), letter_weights(masks)
            with self.autocast:
                mean, logvar = encoded(vae, pictures)
                made = decoded(vae, mean + torch.exp(0.5 * logvar) * torch.randn_like(mean))
            difference = ((made - pictures).abs() * weights).mean()
            sharpness = sum(
                (ours - theirs).abs().mean() for ours, theirs in zip(edges(made), edges(pictures))
            )
            divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
            learner.update(difference + 2 * sharpness + options.kl * divergence)
            return torch.stack([difference.detach(), sharpness.detach(), divergence.detach()])

        updates, scored = Updates(step, device), time.monotonic()
        for update, done in self.batches(options.autoencoder_seconds):
            learner.schedule(update, done)
            losses = updates(self.masks[torch.randint(len(self.masks), (options.batch // 4,), device=device)])
            if time.monotonic() - scored > options.every:
                self.judge_autoencoder(learner.mean, update, losses)
                scored = time.monotonic()
        vae = learner.mean.eval()
        self.judge_autoencoder(vae, update, losses)
        state = {name: tensor.cpu() for name, tensor in vae.state_dict().items()}
        torch.save(state, options.out / "autoencoder.pt")
        return vae

    def sample_pictures(self, count: int) -> Tensor:
        return paint(self.masks[torch.randint(len(self.masks), (count,), device=self.device)])

    @torch.no_grad()
    def encode(self, vae: nn.Module, pictures: Tensor) -> Tensor:
        """[B, C, H / 8, W / 8] a draw of the latents, not standardised."""
        with self.autocast:
            mean, logvar = encoded(vae, pictures)
        return (mean + torch.exp(0.5 * logvar) * torch.randn_like(mean))[:, :, 0]

    @torch.no_grad()
    def judge_autoencoder(self, vae: nn.Module, update: int, losses: Tensor) -> None:
        with self.autocast:
            mean, logvar = encoded(vae, self.shown)
            made = decoded(vae, mean)
        self.log(
            stage="autoencoder",
            updates=update + 1,
            losses=[round(value, 4) for value in losses.tolist()],
            noise=round(float(torch.exp(0.5 * logvar).mean() / mean.std()), 3),
            ocr=round(self.reader.score(made, self.shown_words), 4),
        )
        save_sheet(self.options.out / "reconstructions.png", made[:64])

    def train_denoiser(self, vae: nn.Module) -> None:
        options, size, device = self.options, self.size, self.device
        statistics = self.measure_latents(vae)
        tokens = self.encode_masks(vae, statistics)
        transformer = make_transformer(size).to(device)
        for block in transformer.transformer_blocks:  # starts as the identity
            for modulation in (block.img_mod[1], block.txt_mod[1]):
                nn.init.zeros_(modulation.weight)
                nn.init.zeros_(modulation.bias)
        nn.init.zeros_(transformer.proj_out.weight)
        nn.init.zeros_(transformer.proj_out.bias)
        learner = Learner(transformer, rate=1.5e-3, device=device)
        grid = (1, size.height // 16, size.width // 16)

        def step(clean: Tensor, text: Tensor) -> Tensor:
            noise = torch.randn_like(clean)
            times = torch.sigmoid(0.5 + torch.randn_like(clean[:, 0, 0]))
            noised = torch.lerp(clean, noise, times.view(-1, 1, 1))
            with self.autocast:
                velocity = transformer(
                    hidden_states=noised,
                    timestep=times,
                    encoder_hidden_states=text,
                    img_shapes=[[grid]] * len(clean),
                    return_dict=False,
                )[0]
            loss = ((velocity.float() - (noise - clean)) ** 2).mean()
            learner.update(loss)
            return loss.detach()

        with torch.no_grad():
            by_length = self.embed_words()
            nothing = embed(self.encoder, [" "], device)
        judge = DenoiserJudge(self, vae, statistics, nothing)
        updates, scored, reached = Updates(step, device), time.monotonic(), False
        for update, done in self.batches(options.denoiser_seconds):
            learner.schedule(update, done)
            rows, embeddings = by_length[int(torch.randint(len(by_length), ()))]
            chosen = torch.randint(len(rows), (options.batch,), device=device)
            painting = torch.randint(PAINTINGS, (options.batch,), device=device)
            unprompted = float(torch.rand(())) < UNPROMPTED
            text = nothing.expand(options.batch, -1, -1) if unprompted else embeddings[chosen].float()
            loss = updates(tokens[painting, rows[chosen]].float(), text)
            if time.monotonic() - scored > options.every:
                reached |= judge(learner.mean, update, loss, keep=not reached)
                scored = time.monotonic()
        judge(learner.mean, update, loss, keep=not reached)

    def measure_latents(self, vae: nn.Module) -> tuple[Tensor, Tensor]:
        """The mean and standard deviation [C] of its latents, by channel; they go into its configuration."""
        latents = torch.cat([self.encode(vae, self.sample_pictures(2048)) for _ in range(4)])
        mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        return mean, std

    def encode_masks(self, vae: nn.Module, statistics: tuple[Tensor, Tensor]) -> Tensor:
        """[PAINTINGS, masks, tokens, 4 C] standardised latents in bf16."""
        mean, std = (values.view(1, -1, 1, 1) for values in statistics)
        paintings = [
            torch.cat(
                [
                    packed((self.encode(vae, paint(part)) - mean) / std).bfloat16()
                    for part in self.masks.split(2048)
                ]
            )
            for _ in range(PAINTINGS)
        ]
        self.log(stage="latents", mean=statistics[0].tolist(), std=statistics[1].tolist())
        return torch.stack(paintings)

    def embed_words(self) -> list[tuple[Tensor, Tensor]]:
        """For each length of words: rows of the masks, and the embeddings of their prompts in bf16."""
        lengths = sorted({len(word) for word in self.words})
        parts = []
        for length in lengths:
            rows = [row for row, word in enumerate(self.words) if len(word) == length]
            prompts = [PROMPT.format(word=self.words[row]) for row in rows]
            embeddings = torch.cat(
                [
                    embed(self.encoder, prompts[start : start + 8192], self.device).bfloat16()
                    for start in range(0, len(prompts), 8192)
                ]
            )
            parts.append((torch.tensor(rows, device=self.device), embeddings))
        self.log(stage="embeddings", tokens=[part.shape[1] for _, part in parts])
        return parts


class DenoiserJudge:
    """Draws held-out words and scores them; writes checkpoints."""

    def __init__(
        self, pretraining: Pretraining, vae: nn.Module, statistics: tuple[Tensor, Tensor], nothing: Tensor
    ) -> None:
        self._parent, self._vae, self._statistics, self._nothing = pretraining, vae, statistics, nothing
        self._words = [word for word in HELD_OUT + TRAINING[:16] for _ in range(4)]
        self._count = 0
        size, device = pretraining.size, pretraining.device
        tokens = (size.height // 16) * (size.width // 16)
        self._schedule = make_schedule(SCHEDULER, STEPS, tokens)
        generator = torch.Generator(device).manual_seed(2)
        self._noise = torch.randn(
            len(self._words), tokens, 4 * size.latent_channels, device=device, generator=generator
        )

    @torch.no_grad()
    def __call__(self, transformer: nn.Module, update: int, loss: Tensor, keep: bool) -> bool:
        """True where the score without guidance has reached the one asked for."""
        parent = self._parent
        scores, sheets = {}, []
        for scale in GUIDANCE:
            pictures = torch.cat([self._draw(transformer, length, scale) for length in (3, 4)])
            words = self._in_order()
            texts = parent.reader.texts(pictures)
            values = [similarity(text, word) for text, word in zip(texts, words)]
            held_out = [value for value, word in zip(values, words) if word in set(HELD_OUT)]
            scores[f"guidance {scale:g}"] = {
                "held out": round(sum(held_out) / len(held_out), 4),
                "whole words": round(sum(value == 1 for value in held_out) / len(held_out), 4),
            }
            sheets.append(pictures[:: len(pictures) // 32][:32])
        parent.log(stage="denoiser", updates=update + 1, loss=round(float(loss), 4), ocr=scores)
        self._count += 1
        save_sheet(parent.options.out / f"samples_{self._count:02d}.png", torch.cat(sheets))
        facts = {
            "seed": parent.options.seed,
            "updates": update + 1,
            "ocr": scores,
            "torch": torch.__version__,
        }
        arguments = (parent.size, parent.encoder, self._vae, transformer, facts)
        pack(parent.options.out / f"denoiser_{self._count:02d}.safetensors", *arguments)
        score = scores[f"guidance {GUIDANCE[0]:g}"]["held out"]
        if keep:
            pack(parent.options.out / "glyph.safetensors", *arguments)
        return score >= parent.options.score

    def _in_order(self) -> list[str]:
        return [word for length in (3, 4) for word in self._words if len(word) == length]

    def _draw(self, transformer: nn.Module, length: int, scale: float) -> Tensor:
        parent, size = self._parent, self._parent.size
        rows = [row for row, word in enumerate(self._words) if len(word) == length]
        text = embed(parent.encoder, [PROMPT.format(word=self._words[row]) for row in rows], parent.device)
        latents = self._noise[rows]
        nothing = self._nothing.expand(len(rows), -1, -1)
        grid = (1, size.height // 16, size.width // 16)
        sigmas = self._schedule.sigmas.tolist()
        for sigma, after in zip(sigmas[:-1], sigmas[1:]):

            def velocity(text: Tensor, latents: Tensor = latents, sigma: float = sigma) -> Tensor:
                return transformer(
                    hidden_states=latents,
                    timestep=torch.full((len(latents),), sigma, device=latents.device),
                    encoder_hidden_states=text,
                    img_shapes=[[grid]] * len(latents),
                    return_dict=False,
                )[0]

            prompted = velocity(text)
            if scale != 1:  # Qwen-Image's guidance: the norm stays the prompted one's
                unprompted = velocity(nothing)
                guided = unprompted + scale * (prompted - unprompted)
                prompted = guided * (prompted.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
            latents = latents + (after - sigma) * prompted
        mean, std = (values.view(1, -1, 1, 1) for values in self._statistics)
        unpacked = QwenImagePipeline._unpack_latents(latents, size.height, size.width, 8)[:, :, 0]
        return decoded(self._vae, (unpacked * std + mean).unsqueeze(2))


def encoded(vae: nn.Module, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log-variance [B, C, 1, H / 8, W / 8] fp32 of the latents of pictures [B, 3, H, W]."""
    frames = pictures.contiguous(memory_format=torch.channels_last).unsqueeze(2)
    mean, logvar = vae.quant_conv(vae.encoder(frames)).float().chunk(2, 1)
    return mean, logvar.clamp(-30, 20)


def decoded(vae: nn.Module, latents: Tensor) -> Tensor:
    """[B, C, 1, H, W] -> pictures [B, 3, 8 H, 8 W] fp32, not clamped, so that gradients are not lost."""
    return vae.decoder(vae.post_quant_conv(latents))[:, :, 0].float()


def packed(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> tokens [B, H W / 4, 4 C], as the pipeline packs them."""
    count, channels, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents, count, channels, height, width)


if __name__ == "__main__":
    main()
