"""Checks of every state, alone and against the state before it. The shell runs them before it writes.

Each check holds one promise. A violation names the promise, with the numbers. Nothing is repaired here. States that the
types exclude, such as a suspended component with GPUs, need no check (`components`).

Invariant: each check finds a state that breaks it, and none finds anything in a sound state.
[test_invariants: breaks_an_invariant]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.state.absent import lasts
from services.scheduler.state.cluster_state import OVER, TERMINAL, ClusterState, Phase
from services.scheduler.state.components import Working
from services.scheduler.state.course import KEPT, Summary, accounting_fault
from services.scheduler.state.layouts import replica_size
from services.scheduler.state.values import Fate
from tidegate.ownership.records import GpuState
from tidegate.types import NO_TOKEN, GpuId, Grant, Role, node_of

_RANK = {
    Phase.SUBMITTED: 0,
    Phase.STARTING: 1,
    Phase.RUNNING: 1,
    Phase.PAUSED: 1,
    Phase.STOPPING: 2,
    Phase.FINISHED: 3,
    Phase.FAILED: 3,
    Phase.CANCELLED: 3,
}
"""A job goes up in this order; one write may take several steps. Only a new submission takes it down again."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


def check(previous: ClusterState, state: ClusterState) -> list[Violation]:
    """The violations of `state`, which follows `previous`; empty when all is well. The owners of GPUs and the summaries
    are not checked again where they are the very objects of `previous`, which was checked: most events are progress."""
    checks = (
        () if _has_the_same_owners(previous, state) else _one_owner_a_gpu(state),
        _open_transitions_hold_their_gpus(state),
        _layouts_have_their_ranks(state),
        () if previous.summaries is state.summaries else _samples_add_up(state),
        _accounts_stay(previous, state),
        _pictures_are_of_an_open_iteration(state),
        _versions_are_evaluated_once(state),
        _all_is_waited_for_with_a_deadline(state),
        _absences_last(previous, state),
        _counters_only_grow(previous, state),
        _tokens_only_grow(previous, state),
        _phases_follow(previous, state),
    )
    return [violation for found in checks for violation in found]


def _has_the_same_owners(previous: ClusterState, state: ClusterState) -> bool:
    is_same = previous.gpus is state.gpus and previous.components is state.components
    return is_same and previous is not state


def _one_owner_a_gpu(state: ClusterState) -> Iterator[Violation]:
    holder: dict[GpuId, Role] = {}
    for role in Role:
        for grant in state.components[role].grants:
            other = holder.setdefault(grant.gpu, role)
            if other is not role:
                yield Violation("one owner a GPU", f"{grant.gpu} works for the {other} and the {role}")
            record = state.gpus.get(grant.gpu)
            if record is None or record.token > grant.token:
                continue
            if record.state is not GpuState.OWNED or record.owner != state.owner(role):
                holds = f"{record.state}, owner {record.owner or 'none'}"
                yield Violation("one owner a GPU", f"{grant.gpu} works for the {role}; the store has it {holds}")


def _open_transitions_hold_their_gpus(state: ClusterState) -> Iterator[Violation]:
    holder: dict[GpuId, str] = {}
    for transition in state.transitions.values():
        if not transition.is_open or transition.deadline_unix_ms <= 0:
            detail = f"{transition.id} is {transition.outcome}, deadline {transition.deadline_unix_ms} ms"
            yield Violation("no open transition without a deadline", detail)
        for move in transition.moves:
            other = holder.setdefault(move.gpu, transition.id)
            if other != transition.id:
                yield Violation("one open transition a GPU", f"{move.gpu} is held by {other} and {transition.id}")


def _layouts_have_their_ranks(state: ClusterState) -> Iterator[Violation]:
    for role in Role:
        at_work = state.components[role].state
        if not isinstance(at_work, Working):
            continue
        layout = at_work.placed.layout
        num_grants, num_ranks = len(at_work.grants), layout.num_ranks
        # Engines and copies work one by one, an actor waits for its dead ranks, and a component that stops lets go of
        # its GPUs one by one.
        match role:
            case _ if state.phase in OVER or role is Role.ROLLOUT:
                lacks = False
            case Role.INFERENCE:
                lacks = num_grants % replica_size(layout) > 0
            case _:
                lacks = num_grants + at_work.num_deaths < num_ranks
        if num_grants > num_ranks or lacks:
            detail = f"the {role} has {num_grants} grants for layout {layout} of {num_ranks} ranks"
            yield Violation("a layout's ranks are its grants", detail)


def _samples_add_up(state: ClusterState) -> Iterator[Violation]:
    seen: set[int] = set()
    for summary in state.summaries:
        if (wrong := accounting_fault(summary)) is not None:
            yield Violation("generated = trained + filtered + discarded", wrong)
        if summary.is_superseded:
            continue
        if summary.iteration in seen:
            yield Violation("an iteration is once in the lineage", f"iteration {summary.iteration} is there twice")
        seen.add(summary.iteration)


def _accounts_stay(previous: ClusterState, state: ClusterState) -> Iterator[Violation]:
    """The accounts of generated samples are kept: of closed iterations, and of one that was open. Only the oldest ones
    make room, where there are as many as a state keeps."""
    name, before, after = "no account is dropped", previous.summaries, state.summaries
    num_stayed = len(before)
    if after[: len(before)] != before:
        known, found = [_account(each) for each in before], [_account(each) for each in after]
        stayed = [each for each in known if each in found]
        num_stayed = len(stayed)
        makes_room = len(found) == KEPT and known[len(known) - num_stayed :] == stayed
        if found[:num_stayed] != stayed or not (makes_room or stayed == known):
            yield Violation(name, f"{len(known)} summaries became {len(found)}, and other ones")
    was_open = previous.iteration
    if was_open is None:
        return
    opened = (was_open.plan.iteration, previous.incarnation)
    is_open = state.iteration is not None and (state.iteration.plan.iteration, state.incarnation) == opened
    if not is_open and opened not in [(each.iteration, each.incarnation) for each in after[num_stayed:]]:
        yield Violation(name, f"iteration {opened[0]} of incarnation {opened[1]} was open, and has no summary")


def _account(summary: Summary) -> tuple[int, int, Fate]:
    return summary.iteration, summary.incarnation, summary.generated


def _pictures_are_of_an_open_iteration(state: ClusterState) -> Iterator[Violation]:
    seen = state.seen
    names = [name for name in ("generation", "inferring", "training") if getattr(seen, name) is not None]
    if names and state.iteration is None:
        yield Violation("pictures are of an open iteration", f"{', '.join(names)} seen, and none is open")


def _versions_are_evaluated_once(state: ClusterState) -> Iterator[Violation]:
    versions = [evaluation.version for evaluation in state.evaluations]
    if versions != sorted(set(versions)):
        yield Violation("a version is evaluated once", f"the evaluations are of versions {versions}")


def _all_is_waited_for_with_a_deadline(state: ClusterState) -> Iterator[Violation]:
    for key, expectation in state.expectations.items():
        if key != expectation.key or expectation.due_ms <= 0:
            detail = f"{key} is kept as {expectation.key}, due at {expectation.due_ms} ms"
            yield Violation("a command is waited for until a deadline", detail)


def _absences_last(previous: ClusterState, state: ClusterState) -> Iterator[Violation]:
    """A GPU that the job goes on without cannot be had, and was waited for without a break."""
    name = "what is absent cannot be had"
    for gpu, absence in state.absent.items():
        if not lasts(state, gpu, absence):
            known = state.gpus.get(gpu)
            yield Violation(name, f"{gpu} counts as absent under {absence.token}; the store has {known or 'nothing'}")
        before, since_ms = previous.absent.get(gpu), absence.since_ms
        if before is None or before.token != absence.token or before.since_ms is None or since_ms is None:
            continue
        if since_ms < before.since_ms:
            yield Violation(name, f"{gpu} was absent since {before.since_ms} ms, and then since {since_ms} ms")


def _counters_only_grow(previous: ClusterState, state: ClusterState) -> Iterator[Violation]:
    for name in ("version", "incarnation", "applied_seq", "num_transitions"):
        before, after = getattr(previous, name), getattr(state, name)
        if after < before:
            yield Violation("counters only grow", f"{name} went from {before} to {after}")
    for role in Role:
        earlier, later = previous.components[role].lead, state.components[role].lead
        if earlier and (later is None or later.epoch < earlier.epoch):
            epoch = later.epoch if later else "none"
            yield Violation("counters only grow", f"the {role}'s lead epoch went from {earlier.epoch} to {epoch}")
    for name, instance in previous.instances.items():
        known = state.instances.get(name)
        if known is None or known.boot < instance.boot:
            yield Violation("counters only grow", f"the boot of {name} went from {instance.boot} to {known}")


def _tokens_only_grow(previous: ClusterState, state: ClusterState) -> Iterator[Violation]:
    if previous.gpus is state.gpus:
        return
    is_new_submission = state.submission != previous.submission
    nodes = {node_of(gpu) for gpu in state.spec.gpus} if state.spec else set()
    for gpu, record in previous.gpus.items():
        known = state.gpus.get(gpu)
        # A submission forgets the tokens: the store may have lost them. Its config may leave nodes out.
        is_forgotten = known.token == NO_TOKEN if known else node_of(gpu) not in nodes
        if is_new_submission and is_forgotten:
            continue
        # The store lost a grant that nobody has.
        if known and known.state is GpuState.FREE and Grant(gpu, record.token) in previous.released:
            continue
        if known is None or known.token < record.token:
            token = known.token if known else "none"
            yield Violation("tokens only grow", f"the token of {gpu} went from {record.token} to {token}")


def _phases_follow(previous: ClusterState, state: ClusterState) -> Iterator[Violation]:
    goes_back = _RANK[state.phase] < _RANK[previous.phase]
    ended_before = previous.phase in TERMINAL and state.phase is not previous.phase
    if (goes_back or ended_before) and state.submission == previous.submission:
        yield Violation("phases follow their order", f"from {previous.phase} to {state.phase}")
    if state.phase is Phase.STOPPING and state.outcome not in TERMINAL:
        yield Violation("phases follow their order", f"{state.phase} with the outcome {state.outcome}")
