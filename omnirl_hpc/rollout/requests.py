"""The groups of a step -> the sample requests of this rank's replica."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from omnirl_hpc.config.schema import Config, WindowConfig
from omnirl_hpc.data.sampler import Group
from omnirl_hpc.errors import DataError
from omnirl_hpc.layout import Layout
from omnirl_hpc.models.family import ModelFamily
from omnirl_hpc.rollout.conditions import ConditionCache
from omnirl_hpc.rollout.engine import SampleRequest
from omnirl_hpc.sampling.samples import SampleIdentity
from omnirl_hpc.sampling.windows import NO_STEPS, draw_window


def make_requests(
    config: Config,
    family: ModelFamily,
    encode: ConditionCache,
    layout: Layout,
    step: int,
    groups: Sequence[Group],
    window: WindowConfig | None,
    *,
    width: int | None = None,
    only: Collection[int] | None = None,
    whole_groups: bool = False,
) -> list[SampleRequest]:
    """One request for each sample of the replica's groups, group after group. window: where the stochastic
    steps may be; None: there are none.

    `groups` are those of all replicas: their longest prompt sets the width of the step, on every rank the
    same, where no `width` is given. only: the groups to generate; None: all. The ranks of a replica take
    turns in owning the samples, or, with whole_groups, all samples of a group.
    """
    guided = config.sampling.true_cfg_scale > 1
    width = width or condition_width(config, family, groups)
    count = config.data.samples_per_prompt
    requests = []
    for turn, index in enumerate(layout.groups(len(groups))):
        if only is not None and index not in only:
            continue
        group, prompt = groups[index], groups[index].prompt
        condition = encode(prompt)
        negative = encode(replace(prompt, prompt=negative_text(config, group))) if guided else None
        for place in range(count):
            sample = group.first_sample + place
            identity = SampleIdentity(config.seed, step, prompt.id, sample)
            steps, start = NO_STEPS, None
            if window is not None:
                if config.sampling.shared_noise:
                    start = replace(identity, sample=group.first_sample)
                sampling = replace(config.sampling, window=window)
                steps = draw_window(sampling, config.seed, step, prompt.id, sample)
            owner = (turn if whole_groups else turn * count + place) % layout.replica_size
            requests.append(
                SampleRequest(identity, group.index, steps, condition, negative, width, owner, start)
            )
    return requests


def condition_width(config: Config, family: ModelFamily, groups: Sequence[Group]) -> int:
    """The width that the conditions of the groups' prompts and, with guidance, of their negative ones are
    padded to. Raises DataError for one that is too long.
    """
    guided, widths, needed = config.sampling.true_cfg_scale > 1, config.data.text_lengths, []
    for group in groups:
        texts = [group.prompt.prompt, negative_text(config, group)][: 1 + guided]
        try:
            needed.append(family.condition_width(texts, widths))
        except DataError as error:
            raise DataError(f"{group.prompt.place}: {error}") from None
    return max(needed)


def negative_text(config: Config, group: Group) -> str:
    return group.prompt.negative_prompt or config.data.negative_prompt
