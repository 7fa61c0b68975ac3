"""The iteration machine: weights published and held -> opened -> reported -> added up -> closed -> the next one.

Versions go up by one an iteration.

Invariants:
- An iteration opens only when rollout and inference hold its version. [test_lifecycle: confirmed_its_version]
- An iteration closes only when its samples add up by ids. Otherwise the job fails with the numbers.
  [test_lifecycle: fail_the_job_though_the_numbers_agree]
- An iteration closes only after the evaluation of its version. [test_evaluations: before_it_closes]
- A published version never changes its checksum. [test_lifecycle: weights_that_differ]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.evolve import accounts, evaluations
from services.scheduler.evolve.admission import Refused
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.components import Component, Loaded, Working, role_of_instance
from services.scheduler.state.course import Iteration, accounting_fault, newest
from services.scheduler.state.learned import with_lengths
from services.scheduler.state.observed import Pictures
from services.scheduler.state.values import JobSpec
from tidegate.types import Role

READERS = (Role.ROLLOUT, Role.INFERENCE)
"""The components that load the weights which the actor publishes."""


def published(state: ClusterState, body: ev.WeightsPublished) -> ClusterState | Refused:
    """Snapshots are kept from the version on that readers must hold now."""
    snapshot = body.snapshot
    known = state.snapshots.get(snapshot.version)
    if snapshot.incarnation != state.incarnation:
        return Refused("of an older incarnation")
    if known is not None and known.checksum != snapshot.checksum:
        message = (
            f"version {snapshot.version} was published with checksum {known.checksum} and again with "
            f"{snapshot.checksum}: a version is immutable; resume from the last checkpoint"
        )
        return state.stopping(Phase.FAILED, message)
    if snapshot.version < state.target_version:
        return Refused("of an older version")
    snapshots = {**state.snapshots, snapshot.version: snapshot}
    kept = {version: each for version, each in sorted(snapshots.items()) if version >= state.target_version}
    return replace(state, snapshots=kept, reference=body.reference or state.reference)


def loaded(state: ClusterState, event: ev.Event, body: ev.WeightsLoaded) -> ClusterState | Refused:
    role = role_of_instance(event.source)
    snapshot = state.snapshots.get(body.version)
    if role not in READERS or snapshot is None:
        return Refused("of a version that is not published")
    if body.checksum != snapshot.checksum:
        message = (
            f"the {role} loaded version {body.version} with checksum {body.checksum}, the actor published "
            f"{snapshot.checksum}: its weights are not the actor's; resume from the last checkpoint"
        )
        return state.stopping(Phase.FAILED, message)
    component = state.components[role]
    at_work = component.state
    if not isinstance(at_work, Working):
        return Refused("by a component that is down")
    held = Loaded(incarnation=state.incarnation, version=body.version, checksum=body.checksum)
    has_reference = at_work.has_reference or state.needs_reference(role)
    at_work = replace(at_work, loaded=held, has_reference=has_reference)
    return state.with_component(role, replace(component, state=at_work))


def reported(state: ClusterState, event: ev.Event, body: ev.IterationReported) -> ClusterState | Refused:
    iteration, role = state.iteration, role_of_instance(event.source)
    if role is None or iteration is None or event.iteration != iteration.plan.iteration:
        return Refused("of an iteration that is not open")
    if iteration.is_accounted and role in accounts.ACCOUNTANTS:
        return Refused("of an iteration whose accounts are in")
    iteration = accounts.with_report(iteration, role, body)
    state = replace(state, iteration=iteration)
    if (
        accounts.is_reported(iteration)
        and (fault := accounting_fault(accounts.summarize(state, iteration))) is not None
    ):
        return state.stopping(Phase.FAILED, fault)
    return state


def advance(state: ClusterState) -> ClusterState:
    """The steps that follow from the state alone; none while the job is ending."""
    spec = state.spec
    if spec is None or state.phase not in (Phase.STARTING, Phase.RUNNING, Phase.PAUSED):
        return state
    state = _closed_iteration(_accounted(state), spec)
    if state.iteration is not None:
        return state
    if state.next_iteration >= spec.num_iterations:
        if state.next_version not in state.snapshots or evaluations.is_owed(state, state.next_version):
            # The actor saves and publishes after its report. Until then its last updates can still be lost.
            return state
        return state.stopping(Phase.FINISHED, f"all {spec.num_iterations} iterations are done")
    return _opened_iteration(state, spec)


def _accounted(state: ClusterState) -> ClusterState:
    """Mark the iteration as accounted. Its accounts add up, or the job would be ending. The rollout holds its version
    until they are in."""
    iteration = state.iteration
    if iteration is None or iteration.is_accounted or not accounts.is_reported(iteration):
        return state
    if evaluations.is_owed(state, iteration.plan.version):
        return state
    return replace(state, iteration=replace(iteration, is_accounted=True))


def _closed_iteration(state: ClusterState, spec: JobSpec) -> ClusterState:
    iteration = state.iteration
    if iteration is None or not iteration.is_accounted or set(iteration.closed) != set(Role):
        return state
    summary = accounts.summarize(state, iteration)
    return replace(
        state,
        summaries=newest((*state.summaries, summary)),
        iteration=None,
        seen=Pictures(),
        learned=with_lengths(state.learned, state.seen.generation, spec.lengths),
        next_iteration=iteration.plan.iteration + 1,
        next_version=iteration.plan.version + 1,
        next_prompt=iteration.plan.first_prompt + summary.generated.num_samples // iteration.plan.group_size,
        snapshots={version: each for version, each in state.snapshots.items() if version > iteration.plan.version},
    )


def _opened_iteration(state: ClusterState, spec: JobSpec) -> ClusterState:
    if state.phase is Phase.PAUSED or not all(state.components[role].is_up for role in Role):
        return state
    if not all(state.holds(role, state.next_version) for role in READERS):
        return state
    plan = spec.plan(iteration=state.next_iteration, version=state.next_version, first_prompt=state.next_prompt)
    state = state.with_component(Role.ACTOR, _counted_anew(state.components[Role.ACTOR]))
    return replace(state, phase=Phase.RUNNING, message="", iteration=Iteration(plan=plan))


def _counted_anew(component: Component) -> Component:
    """The actor as an iteration opens. Ranks that it still lacks, or may come to lack, stay counted as deaths."""
    actor = component.state
    assert isinstance(actor, Working), f"an iteration opens while the actor is {actor.CASE}"
    num_lacking = actor.placed.layout.num_ranks - len(actor.grants)
    return replace(component, state=replace(actor, num_deaths=num_lacking + len(actor.dead_members)))
