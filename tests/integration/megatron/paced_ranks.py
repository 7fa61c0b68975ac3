"""Rank processes of paced workers. Each does the same work without a pace and under one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.inference.scorer import MegatronScorer
from tests.integration.elastic.world_ranks import open_store
from tests.integration.inference.scoring import elsewhere, groups, named, scorer_of
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import copies, state_files, trainer, world
from tests.ranks import RankContext, Results
from tidegate.config.sections.pace import PaceSection
from tidegate.elastic import checkpoints
from tidegate.megatron import parallel
from tidegate.pace.law import PaceLaw
from tidegate.runtime.pacer import Pacer

LAW = PaceLaw(PaceSection(train_half_tokens=0, time_scale=200.0))
"""A hundred tokens train in some 0.3 s, and are scored in 1 s."""


def update(context: RankContext, *, layout: dict[str, int]) -> Results:
    """The state after one update, alone and under the pace; the seconds of the second, and what it counted."""
    results: Results = {}
    counts: list[Mapping[str, int]] = []
    store = open_store(context)
    for epoch, (name, pacer) in enumerate({"unpaced": None, "paced": Pacer(LAW, on_counts=counts.append)}.items(), 1):
        with trainer(context, layout, small_job.trainer_settings(), store=store, epoch=epoch, pacer=pacer) as actor:
            began_s = time.monotonic()
            actor.train_minibatch(small_job.recorded_samples(), 1e-3)
            results[f"{name}/seconds"] = np.array(time.monotonic() - began_s)
            results |= {f"{name}/state/{key}": tensor.numpy() for key, tensor in copies(actor).items()}
    (count,) = counts
    return results | {"num_steps": np.array(count["paced_steps"])}


def scoring(context: RankContext, *, layout: dict[str, int], folder: str) -> Results:
    """Log-probabilities of all groups, alone and under the pace; the seconds of the second, and what it counted."""
    settings = small_job.trainer_settings()
    with trainer(context, layout, settings) as actor:
        checkpoints.save_weights(actor.elastic, Path(folder) / "0", f"rank{actor.elastic.world.me}")
        context = elsewhere(context, actor)
    parallel.stop()
    counts: list[Mapping[str, int]] = []
    with world(context, layout) as ranks:
        results: Results = {}
        unpaced = scorer_of(ranks, settings)
        paced: MegatronScorer = replace(unpaced, pacer=Pacer(LAW, on_counts=counts.append))
        for name, scorer in {"unpaced": unpaced, "paced": paced}.items():
            scorer.load(state_files(Path(folder) / "0"), version=0, reference=False)
            began_s = time.monotonic()
            results |= named(name, scorer.policy_log_probs(groups()))
            results[f"{name}/seconds"] = np.array(time.monotonic() - began_s)
        (count,) = counts
        return results | {"num_steps": np.array(count["paced_steps"])}
