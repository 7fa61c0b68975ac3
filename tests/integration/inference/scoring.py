"""What the rank processes of the scorer's tests run; each returns a dict of arrays by `<what>/<group>/<sample>`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from services.actor.trainer import MegatronTrainer
from services.inference.scorer import LogProbs, MegatronScorer, ScorerSettings
from tests.integration.megatron import recorded
from tests.integration.megatron.jobs import CPU, state_files, world
from tests.ranks import RankContext, Results
from tidegate.megatron.parallel import ParallelRanks

RATE = 0.05
"""Of the one update between the reference and the policy: enough for their log-probabilities to differ plainly."""


def groups() -> list[list[list[int]]]:
    """Recorded sequences, by group."""
    sequences = [list(sample.tokens) for sample in recorded.recorded_samples()]
    size = recorded.GROUP_SIZE
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def beside_the_actor(context: RankContext, *, layout: dict[str, int], folder: str) -> Results:
    """The actor publishes version 0, makes an update, publishes version 1; a scorer of its layout loads both.

    Each group's log-probabilities by the actor at both versions, by the scorer alone and with all groups in one call,
    and by the scorer's reference.
    """
    with world(context, layout) as ranks:
        actor = MegatronTrainer(recorded.trainer_settings(), ranks, device=CPU)
        results = _by_actor(actor, "actor-0")
        _publish(actor, Path(folder) / "0")
        actor.train_minibatch(recorded.recorded_samples(), RATE)
        results |= _by_actor(actor, "actor-1")
        _publish(actor, Path(folder) / "1")
        scorer = _scorer(ranks)
        scorer.load(state_files(Path(folder) / "0"), version=0, reference=True)
        scorer.load(state_files(Path(folder) / "1"), version=1, reference=False)
        for number, group in enumerate(groups()):
            alone = scorer.policy_log_probs([group])
            results |= _named("alone", {(number, sample): values for (_, sample), values in alone.items()})
        results |= _named("together", scorer.policy_log_probs(groups()))
        results |= _named("reversed", _turned(scorer.policy_log_probs(groups()[::-1])))
        return results | _named("reference", scorer.reference_log_probs(groups()))


def from_snapshot(context: RankContext, *, layout: dict[str, int], folder: str) -> Results:
    """A scorer of any layout loads both versions that another one published, then the policy's again as the next."""
    with world(context, layout) as ranks:
        scorer = _scorer(ranks)
        refusal = ""
        try:
            scorer.policy_log_probs(groups())
        except ValueError as error:
            refusal = str(error)
        results: Results = {"refusal": np.array(refusal), "had_reference": np.array(scorer.has_reference)}
        scorer.load(state_files(Path(folder) / "0"), version=0, reference=True)
        scorer.load(state_files(Path(folder) / "1"), version=1, reference=False)
        results |= _named("policy", scorer.policy_log_probs(groups()))
        scorer.load(state_files(Path(folder) / "0"), version=2, reference=False)
        results |= _named("policy-again", scorer.policy_log_probs(groups()))
        scorer.load(state_files(Path(folder) / "1"), version=3, reference=False)
        results |= _named("reference", scorer.reference_log_probs(groups()))
        return results | {"version": np.array(scorer.version)}


def _scorer(ranks: ParallelRanks) -> MegatronScorer:
    settings = recorded.trainer_settings()
    return MegatronScorer(
        ScorerSettings(
            model=settings.model,
            padded_vocab=settings.padded_vocab,
            temperature=settings.temperature,
            limits=settings.limits,
        ),
        ranks,
        CPU,
    )


def _by_actor(actor: MegatronTrainer, what: str) -> Results:
    """Group by group, so that its micro-batches are cut as the scorer's are."""
    return {
        f"{what}/{number}/{sample}": values
        for number, group in enumerate(groups())
        for sample, values in actor.log_probs(group).items()
    }


def _publish(actor: MegatronTrainer, folder: Path) -> None:
    actor.publish(folder, f"rank{dist.get_rank()}")
    dist.barrier()


def _named(what: str, log_probs: LogProbs) -> Results:
    return {f"{what}/{group}/{sample}": values for (group, sample), values in log_probs.items()}


def _turned(log_probs: LogProbs) -> LogProbs:
    """Of groups scored in reverse order, under their own numbers."""
    last = len(groups()) - 1
    return {(last - group, sample): values for (group, sample), values in log_probs.items()}
