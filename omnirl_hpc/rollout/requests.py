"""The groups of a step -> the sample requests of this rank's replica."""

from __future__ import annotations

from collections.abc import Sequence

from omnirl_hpc.config.schema import Config
from omnirl_hpc.data.sampler import Group
from omnirl_hpc.errors import DataError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.rollout.embeddings import EmbeddingCache, padded_length
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.windows import draw_window


def make_requests(
    config: Config,
    family: ModelFamily,
    embed: EmbeddingCache,
    layout: Layout,
    step: int,
    groups: Sequence[Group],
) -> list[SampleRequest]:
    """One request for each sample of the replica's groups, group after group.

    `groups` are those of all replicas: their longest prompt sets the padded width of the step, on every rank
    the same.
    """
    guided = config.sampling.true_cfg_scale > 1
    negatives = [g.prompt.negative_prompt or config.data.negative_prompt for g in groups]
    length = text_length(config, family, groups)
    requests = []
    for index in layout.groups(len(groups)):
        group, prompt = groups[index], groups[index].prompt
        text, negative = embed(prompt.prompt), embed(negatives[index]) if guided else None
        for sample in range(group.first_sample, group.first_sample + config.data.samples_per_prompt):
            window = draw_window(config.sampling, config.seed, step, prompt.id, sample)
            requests.append(
                SampleRequest(
                    config.seed, step, group.index, prompt.id, sample, window, text, negative, length
                )
            )
    return requests


def text_length(config: Config, family: ModelFamily, groups: Sequence[Group]) -> int:
    """The padded width of the groups' prompts and, with guidance, of their negative ones. Raises DataError
    for one that is too long.
    """
    guided, lengths = config.sampling.true_cfg_scale > 1, config.data.text_lengths
    length = lengths[0]
    for prompt in (group.prompt for group in groups):
        texts = [prompt.prompt, prompt.negative_prompt or config.data.negative_prompt][: 1 + guided]
        try:
            length = max(length, padded_length([family.count_text_tokens(text) for text in texts], lengths))
        except DataError as error:
            raise DataError(f"{prompt.place}: {error}") from None
    return length
