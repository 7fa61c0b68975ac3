"""Gives the next commands for the open iteration, and for the weights before it. Pure.

1. Rollout and inference load the published version.
2. Each lead opens the iteration.
3. The rollout evaluates the version, where that is due.
4. Each lead closes the iteration once its samples add up.

Inference does not load the last version; the rollout loads it where it is evaluated. A new lead gets the commands again
under its own epoch: it knows nothing of the lead before. An actor that lacks ranks gets commands like any other: its
lead does the work once the ranks are back.
"""

from __future__ import annotations

from services.scheduler.decide.needs import Needs, header
from services.scheduler.evolve import evaluations
from services.scheduler.evolve.accounts import ACCOUNTANTS
from services.scheduler.evolve.iterations import READERS
from services.scheduler.state import commands as cmd
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import AcceptedEvaluation, Iteration
from tidegate.types import Role


def needed_iteration_commands(state: ClusterState, now_ms: int) -> Needs:
    needs = _loads(state, now_ms)
    if state.iteration is None:
        return needs + _evaluates(state, now_ms)
    if state.iteration.is_accounted:
        return needs + _closes(state, state.iteration, now_ms)
    return needs + _opens(state, state.iteration, now_ms) + _evaluates(state, now_ms)


def _loads(state: ClusterState, now_ms: int) -> Needs:
    version = state.target_version
    snapshot = state.snapshots.get(version)
    if snapshot is None:
        return Needs((), (f"version {version} is not published yet",))
    needs = Needs()
    for role in READERS if _has_next(state) else (Role.ROLLOUT,):
        lead = state.lead_of(role)
        if lead is None or not state.components[role].is_up or state.holds(role, version):
            continue
        reference = state.reference if state.needs_reference(role) else None
        if reference is None and state.needs_reference(role):
            needs += Needs((), ("the reference policy, version 0, is not published yet",))
            continue
        # A lead takes no id twice. So the id changes with the members: after a death, and after a transition.
        component = state.components[role]
        members = f"{len(component.grants)}-{(component.switched or '').rpartition('/')[2]}"
        step = f"{state.job}/{state.incarnation}/v{version}/load-{members}"
        load = cmd.LoadWeights(
            header=header(state, role, lead, step=step, now_ms=now_ms),
            weights=snapshot,
            reference=reference,
        )
        needs += Needs((load,), (f"the {role} loads version {version}",))
    return needs


def _has_next(state: ClusterState) -> bool:
    """Whether an iteration is open or comes later."""
    return state.iteration is not None or state.spec is None or state.next_iteration < state.spec.num_iterations


def _evaluates(state: ClusterState, now_ms: int) -> Needs:
    version, lead, rollout = state.target_version, state.lead_of(Role.ROLLOUT), state.components[Role.ROLLOUT]
    if not (evaluations.is_owed(state, version) and evaluations.is_ready(state)):
        return Needs()
    if lead is None or not (rollout.is_up and state.holds(Role.ROLLOUT, version)):
        return Needs((), (f"version {version} is to be evaluated",))
    iteration = state.iteration
    if iteration is not None and iteration.opened.get(Role.ROLLOUT) != lead.epoch:
        # Avoid the end of a new evaluation: a new lead opens the iteration first, because opening ends an evaluation.
        return Needs((), (f"version {version} is to be evaluated",))
    if state.evaluating == AcceptedEvaluation(version, state.incarnation, lead.epoch):
        return Needs((), (f"the rollout evaluates version {version}",))
    step = f"{state.job}/{state.incarnation}/v{version}/evaluate"
    evaluate = cmd.Evaluate(
        header=header(state, Role.ROLLOUT, lead, step=step, now_ms=now_ms),
        iteration=iteration.plan.iteration if iteration else state.next_iteration,
        version=version,
    )
    return Needs((evaluate,), (f"has version {version} evaluated",))


def _step(state: ClusterState, iteration: Iteration, step: str) -> str:
    return f"{state.job}/{state.incarnation}/i{iteration.plan.iteration}/{step}"


def _opens(state: ClusterState, iteration: Iteration, now_ms: int) -> Needs:
    needs = Needs()
    for role in Role:
        lead = state.lead_of(role)
        ready = state.components[role].is_up and (role not in READERS or state.holds(role, iteration.plan.version))
        if lead is None or not ready or iteration.opened.get(role) == lead.epoch:
            continue
        step = _step(state, iteration, "open")
        needs += Needs(
            (cmd.OpenIteration(header(state, role, lead, step=step, now_ms=now_ms), iteration.plan),),
            (f"opens iteration {iteration.plan.iteration} at the {role}",),
        )
    num_reported = sum(role in iteration.reports for role in ACCOUNTANTS)
    note = f"iteration {iteration.plan.iteration}: {len(iteration.opened)} of {len(Role)} components took it"
    return needs + Needs((), (f"{note}, {num_reported} of {len(ACCOUNTANTS)} accounts are in",))


def _closes(state: ClusterState, iteration: Iteration, now_ms: int) -> Needs:
    num_iterations = state.spec.num_iterations if state.spec else 0
    last = iteration.plan.iteration + 1 >= num_iterations
    needs = Needs()
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
        needs += Needs((close,), (f"closes iteration {iteration.plan.iteration} at the {role}",))
    return needs
