"""Decides which versions are evaluated and when, and records the results. Pure.

A version is evaluated if `evaluate_every` divides it. The last version always is. The rollout generates all of the
iteration that trains on the version, then it evaluates the version while inference and actor still work. It evaluates
the last version when no iteration remains.

Invariants:
- The lineage has one evaluation of a version: the first that is reported. [test_evaluations: version_is_reported_once]
- The samples of an evaluation are in no account. [test_evaluations: every_nth_and_the_last_are_evaluated_once]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve.admission import Refused
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import role_of_instance
from services.scheduler.state.course import Evaluation, newest
from tidegate.types import Role


def is_owed(state: ClusterState, version: int) -> bool:
    """Whether the version is due for an evaluation and has none yet."""
    spec = state.spec
    if spec is None or spec.evaluate_every is None:
        return False
    is_due = version % spec.evaluate_every == 0 or version == spec.num_iterations
    return is_due and all(each.version != version for each in state.evaluations)


def is_ready(state: ClusterState) -> bool:
    """Whether the engines have no other work with the version that they hold."""
    iteration, spec = state.iteration, state.spec
    if iteration is not None:
        return Role.ROLLOUT in iteration.reports
    return spec is not None and state.next_iteration >= spec.num_iterations


def reported(state: ClusterState, event: ev.Event, body: ev.EvaluationReported) -> ClusterState | Refused:
    if role_of_instance(event.source) is not Role.ROLLOUT or body.version != state.target_version:
        return Refused("of an evaluation of another version")
    if not is_owed(state, body.version):
        return Refused("of an evaluation that is in")
    evaluation = Evaluation(
        version=body.version,
        incarnation=state.incarnation,
        num_prompts=body.num_prompts,
        samples_per_prompt=body.samples_per_prompt,
        metrics=body.metrics,
    )
    return replace(state, evaluations=newest((*state.evaluations, evaluation)))


def superseded(state: ClusterState, *, next_version: int) -> ClusterState:
    """The lineage continues from `next_version`, whose weights are unchanged. Later versions are evaluated again."""
    kept = tuple(each for each in state.evaluations if each.version <= next_version)
    return replace(state, evaluations=kept)
