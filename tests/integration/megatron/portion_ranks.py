"""The rank processes of the tests of minibatches in portions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from services.actor.microbatch import TrainSample
from services.actor.trainer import MegatronTrainer
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import copies, trainer
from tests.ranks import RankContext, Results
from tidegate.megatron.bundles import bundles_of
from tidegate.types import Layout

RATE = 1e-3
NUM_GROUPS = 7
FIGURES = ("loss", "grad_norm", "absolute_terms", "kl", "ratio", "clip_fraction", "num_tokens", "mismatch_mean")


def updates(
    context: RankContext,
    *,
    layout: dict[str, int],
    cuts: Sequence[Sequence[int]],
    num_logical_shards: int | None,
    aggregation: str = "token-mean",
    tied: bool = False,
    experts: bool = False,
    max_tokens: int | None = None,
) -> Results:
    """One update for each of `cuts`: the bundles that each portion before the last one has. Figures and final state."""
    settings = small_job.trainer_settings(
        tied=tied, experts=experts, grpo=small_job.grpo_settings(aggregation), max_tokens=max_tokens
    )
    with trainer(context, layout, dataclasses.replace(settings, num_logical_shards=num_logical_shards)) as actor:
        figures = [_update(actor, number, cut) for number, cut in enumerate(cuts)]
        results = {f"state/{name}": tensor.numpy() for name, tensor in copies(actor).items()}
        return results | {name: np.array([each[name] for each in figures]) for name in FIGURES}


def _update(actor: MegatronTrainer, number: int, cut: Sequence[int]) -> dict[str, float]:
    bundles = _bundles(actor, number)
    for count in cut:
        portion, bundles = bundles[:count], bundles[count:]
        actor.accumulate(_together(portion), bundle_sizes=list(map(len, portion)))
    assert actor.num_portions == len(cut)
    report = actor.train_minibatch(_together(bundles), RATE, bundle_sizes=list(map(len, bundles)))
    assert report.committed
    assert actor.num_portions == 0
    return report.metrics | {"loss": report.loss, "grad_norm": report.grad_norm}


def _bundles(actor: MegatronTrainer, number: int) -> list[list[TrainSample]]:
    samples = small_job.recorded_samples(num_groups=NUM_GROUPS, seed=number)
    size = small_job.GROUP_SIZE
    groups = [samples[first : first + size] for first in range(0, len(samples), size)]
    lengths = [[len(sample.tokens) for sample in group] for group in groups]
    places = iter(groups)
    sizes = bundles_of(lengths, actor.settings.limits).sizes
    return [_together([next(places) for _ in range(count)]) for count in sizes]


def _together(parts: Sequence[Sequence[TrainSample]]) -> list[TrainSample]:
    return [sample for part in parts for sample in part]


def dropped_by_a_reshard(context: RankContext, *, num_logical_shards: int | None) -> Results:
    """An update; two portions of the next, which a reshard drops; the next in the new layout, in other portions."""
    settings = small_job.trainer_settings(tied=True, grpo=small_job.grpo_settings())
    settings = dataclasses.replace(settings, num_logical_shards=num_logical_shards)
    with trainer(context, {"dp": 2}, settings) as actor:
        figures = [_update(actor, 0, [2])]
        bundles = _bundles(actor, 1)
        for portion in (bundles[:2], bundles[2:4]):
            actor.accumulate(_together(portion), bundle_sizes=list(map(len, portion)))
        before = actor.num_portions
        actor.elastic.reshard(Layout(pp=2))
        dropped = before - actor.num_portions
        figures += [_update(actor, 1, [3, 1]), _update(actor, 2, [])]
        return {name: np.array([each[name] for each in figures]) for name in FIGURES} | {"dropped": np.array(dropped)}
