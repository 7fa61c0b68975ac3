"""What the open iteration, and the weights before it, need next. Pure.

Order: the published version is loaded by rollout and inference, the iteration is opened at each lead, its version
evaluated where that is due, and when its samples add up it is closed at each. The last version is loaded where it is
evaluated. A new lead is asked again under its own epoch: it knows nothing of its forerunner. An actor that lacks ranks
is asked like any other: its lead does what it takes once they are back.
"""

from __future__ import annotations

from services.scheduler.decide.wanted import Wanted, header
from services.scheduler.evolve import evaluations
from services.scheduler.evolve.accounts import ACCOUNTANTS
from services.scheduler.evolve.iterations import READERS
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import Evaluating, Iteration
from tidegate.types import Role


def wanted_iteration(state: ClusterState, now_ms: int) -> Wanted:
    wanted = _loads(state, now_ms)
    if state.iteration is None:
        return wanted + _evaluates(state, now_ms)
    if state.iteration.is_accounted:
        return wanted + _closes(state, state.iteration, now_ms)
    return wanted + _opens(state, state.iteration, now_ms) + _evaluates(state, now_ms)


def _loads(state: ClusterState, now_ms: int) -> Wanted:
    version = state.target_version
    snapshot = state.snapshots.get(version)
    if snapshot is None:
        return Wanted((), (f"version {version} is not published yet",))
    wanted = Wanted()
    for role in READERS if _has_next(state) else (Role.ROLLOUT,):
        lead = state.lead_of(role)
        if lead is None or not state.components[role].is_up or state.holds(role, version):
            continue
        reference = state.reference if state.needs_reference(role) else None
        if reference is None and state.needs_reference(role):
            wanted += Wanted((), ("the reference policy, version 0, is not published yet",))
            continue
        # Asked of those that a death left, or that a transition brought, under an id of its own: the lead takes no id
        # twice.
        component = state.components[role]
        members = f"{len(component.grants)}-{(component.switched or '').rpartition('/')[2]}"
        step = f"{state.job}/{state.incarnation}/v{version}/load-{members}"
        load = cmd.LoadWeights(
            header=header(state, role, lead, step=step, now_ms=now_ms),
            weights=snapshot,
            reference=reference,
        )
        wanted += Wanted((load,), (f"the {role} loads version {version}",))
    return wanted


def _has_next(state: ClusterState) -> bool:
    """Whether an iteration is open or to come."""
    return state.iteration is not None or state.spec is None or state.next_iteration < state.spec.num_iterations


def _evaluates(state: ClusterState, now_ms: int) -> Wanted:
    version, lead, rollout = state.target_version, state.lead_of(Role.ROLLOUT), state.components[Role.ROLLOUT]
    if not (evaluations.is_owed(state, version) and evaluations.is_ready(state)):
        return Wanted()
    if lead is None or not (rollout.is_up and state.holds(Role.ROLLOUT, version)):
        return Wanted((), (f"version {version} is to be evaluated",))
    iteration = state.iteration
    if iteration is not None and iteration.opened.get(Role.ROLLOUT) != lead.epoch:
        # A new lead: what it takes later would end the evaluation.
        return Wanted((), (f"version {version} is to be evaluated",))
    if state.evaluating == Evaluating(version, state.incarnation, lead.epoch):
        return Wanted((), (f"the rollout evaluates version {version}",))
    step = f"{state.job}/{state.incarnation}/v{version}/evaluate"
    evaluate = cmd.Evaluate(
        header=header(state, Role.ROLLOUT, lead, step=step, now_ms=now_ms),
        iteration=iteration.plan.iteration if iteration else state.next_iteration,
        version=version,
    )
    return Wanted((evaluate,), (f"has version {version} evaluated",))


def _step(state: ClusterState, iteration: Iteration, step: str) -> str:
    return f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/{step}"


def _opens(state: ClusterState, iteration: Iteration, now_ms: int) -> Wanted:
    wanted = Wanted()
    for role in Role:
        lead = state.lead_of(role)
        ready = state.components[role].is_up and (role not in READERS or state.holds(role, iteration.plan.version))
        if lead is None or not ready or iteration.opened.get(role) == lead.epoch:
            continue
        step = _step(state, iteration, "open")
        wanted += Wanted(
            (cmd.OpenIteration(header(state, role, lead, step=step, now_ms=now_ms), iteration.plan),),
            (f"opens iteration {iteration.plan.iteration} at the {role}",),
        )
    told = sum(role in iteration.reports for role in ACCOUNTANTS)
    note = f"iteration {iteration.plan.iteration}: {len(iteration.opened)} of {len(Role)} components took it"
    return wanted + Wanted((), (f"{note}, {told} of {len(ACCOUNTANTS)} accounts are in",))


def _closes(state: ClusterState, iteration: Iteration, now_ms: int) -> Wanted:
    num_iterations = state.spec.num_iterations if state.spec else 0
    last = iteration.plan.iteration + 1 >= num_iterations
    wanted = Wanted()
    for role in Role:
        lead = state.lead_of(role)
        if lead is None or role in iteration.closed:
            continue
        step = _step(state, iteration, "close")
        close = cmd.CloseIteration(
            header=header(state, role, lead, step=step, now_ms=now_ms),
            iteration=iteration.plan.iteration,
            last=last,
        )
        wanted += Wanted((close,), (f"closes iteration {iteration.plan.iteration} at the {role}",))
    return wanted
