"""The functions of rank processes in the scorer's tests. Each returns arrays by `<kind>/<group>/<sample>`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from services.actor.settings import TrainerSettings
from services.actor.trainer import MegatronTrainer
from services.inference.scorer import LogProbs, MegatronScorer, ScorerSettings
from tests.integration.elastic.world_ranks import CPU
from tests.integration.megatron import small_job
from tests.integration.megatron.actor_trainer_ranks import state_files, trainer, world
from tests.ranks import RankContext, Results
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.rendezvous import listening_socket
from tidegate.megatron import parallel
from tidegate.megatron.batching import BatchLimits
from tidegate.megatron.parallel import ParallelRanks

RATE = 0.05
"""The learning rate of the update between reference and policy: their log-probabilities must differ clearly."""


def groups() -> list[list[list[int]]]:
    """Recorded sequences, by group."""
    sequences = [list(sample.tokens) for sample in small_job.recorded_samples()]
    size = small_job.GROUP_SIZE
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def beside_the_actor(
    context: RankContext, *, layout: dict[str, int], folder: str, precision: str = "fp32", experts: bool = False
) -> Results:
    """The actor publishes version 0, makes an update, publishes version 1; a scorer of its layout loads both.

    Each group's log-probabilities by the actor at both versions, by the scorer alone and with all groups in one call,
    each response by the scorer in a call of its own, and by the scorer's reference.
    """
    settings = small_job.trainer_settings(precision=precision, experts=experts)
    with trainer(context, layout, settings) as actor:
        results = _by_actor(actor, "actor-0")
        publish(actor, Path(folder) / "0")
        actor.train_minibatch(small_job.recorded_samples(), RATE)
        results |= _by_actor(actor, "actor-1")
        publish(actor, Path(folder) / "1")
        context = elsewhere(context, actor)
    # A scorer's process has no actor before it, whose Megatron globals stay.
    parallel.stop()
    with world(context, layout) as ranks:
        scorer = scorer_of(ranks, settings)
        scorer.load(state_files(Path(folder) / "0"), version=0, reference=True)
        scorer.load(state_files(Path(folder) / "1"), version=1, reference=False)
        for number, group in enumerate(groups()):
            alone = scorer.policy_log_probs([group])
            results |= named("alone", {(number, sample): values for (_, sample), values in alone.items()})
            for sample, sequence in enumerate(group):
                apart = scorer.policy_log_probs([[sequence]])
                results |= named("apart", {(number, sample + place): apart[0, place] for _, place in apart})
        results |= named("together", scorer.policy_log_probs(groups()))
        results |= named("reversed", _turned(scorer.policy_log_probs(groups()[::-1])))
        return results | named("reference", scorer.reference_log_probs(groups()))


def from_snapshot(context: RankContext, *, layout: dict[str, int], folder: str) -> Results:
    """A scorer of any layout loads both versions of another layout, then the policy's weights again as the next
    version."""
    with world(context, layout) as ranks:
        scorer = scorer_of(ranks, small_job.trainer_settings())
        refusal = ""
        try:
            scorer.policy_log_probs(groups())
        except ValueError as error:
            refusal = str(error)
        results: Results = {"refusal": np.array(refusal), "had_reference": np.array(scorer.has_reference)}
        scorer.load(state_files(Path(folder) / "0"), version=0, reference=True)
        scorer.load(state_files(Path(folder) / "1"), version=1, reference=False)
        results |= named("policy", scorer.policy_log_probs(groups()))
        scorer.load(state_files(Path(folder) / "0"), version=2, reference=False)
        results |= named("policy-again", scorer.policy_log_probs(groups()))
        scorer.load(state_files(Path(folder) / "1"), version=3, reference=False)
        results |= named("reference", scorer.reference_log_probs(groups()))
        return results | {"version": np.array(scorer.version)}


def scorer_of(ranks: ParallelRanks, settings: TrainerSettings) -> MegatronScorer:
    assert isinstance(settings.limits, BatchLimits)
    return MegatronScorer(
        ScorerSettings(
            model=settings.model,
            padded_vocab=settings.padded_vocab,
            temperature=settings.temperature,
            limits=settings.limits,
            precision=settings.precision,
        ),
        ranks,
        CPU,
    )


def _by_actor(actor: MegatronTrainer, what: str) -> Results:
    """The actor's log-probabilities, group by group, so that its micro-batches are those of the scorer."""
    return {
        f"{what}/{number}/{sample}": values
        for number, group in enumerate(groups())
        for sample, values in actor.log_probs(group).items()
    }


def publish(actor: MegatronTrainer, folder: Path) -> None:
    checkpoints.save_weights(actor.elastic, folder, f"rank{actor.elastic.world.me}")
    actor.elastic.world.barrier(actor.elastic.world.membership.members)


def elsewhere(context: RankContext, actor: MegatronTrainer) -> RankContext:
    """The next rendezvous of the ranks, because the store of the actor's world has their socket."""
    server = listening_socket() if context.rank == 0 else None
    mine = str(server.getsockname()[1]).encode() if server else b""
    said = actor.elastic.world.gather(actor.elastic.world.membership.members, mine)
    return replace(context, port=int(said[0]), listen_fd=server.detach() if server else None)


def named(what: str, log_probs: LogProbs) -> Results:
    return {f"{what}/{group}/{sample}": values for (group, sample), values in log_probs.items()}


def _turned(log_probs: LogProbs) -> LogProbs:
    """The log-probabilities of groups that were scored in reverse order, under their own numbers."""
    last = len(groups()) - 1
    return {(last - group, sample): values for (group, sample), values in log_probs.items()}
