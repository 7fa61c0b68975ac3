"""What a turn leaves for people: the lines of `tidegate.moves_log`. Pure.

| kind | when | has |
|---|---|---|
| `decision` | the placement changes, or a transition is planned | situation, alternatives with forecasts, choice |
| `step` | a GPU of an open transition has gone a step, or its part where no GPU moves | the GPUs by state |
| `closed` | a transition has ended | its moves, parts and outcome, and whether the job ends |
| `opened`, `reported` | an iteration opens; the actor has reported it | the iteration |

Invariants:
- The same turns give the same lines. [test_chronicle: same_turns_leave_the_same_lines]
- A decision like the one before leaves no line. [test_chronicle: like_the_one_before_leaves_no_line]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.scheduler.decide.proposals import PolicyAnswer
from services.scheduler.decide.turn import Turn
from services.scheduler.policy import Proposal
from services.scheduler.policy.situation import Situation
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import OVER, ClusterState
from tidegate.ownership.records import Transition
from tidegate.types import Role

Line = dict[str, Any]


@dataclass(frozen=True)
class Chronicle:
    """`lines` of a turn, and the `proposal` of the last decision, to compare the next one with."""

    lines: tuple[Line, ...] = ()
    proposal: Proposal | None = None


def chronicle(made: Turn, now_ms: int, *, before: Chronicle, observed: ev.OwnershipObserved | None) -> Chronicle:
    """`before`: of the turn before. `observed`: what this turn read of the store."""
    lines = [*_of_iteration(made, now_ms), *_of_transitions(made, now_ms, observed)]
    if made.decision is None or made.decision.answer is None:
        return Chronicle(tuple(lines), before.proposal)
    answer = made.decision.answer
    planned = [each for each in made.decision.commands if isinstance(each, cmd.PlanTransition)]
    if planned or (answer.proposal.placement and not _is_same(answer.proposal, before.proposal)):
        lines.append(_decision(made.folded, answer, planned, now_ms))
    return Chronicle(tuple(lines), answer.proposal)


def _is_same(proposal: Proposal, before: Proposal | None) -> bool:
    return before is not None and (proposal.placement, proposal.trains) == (before.placement, before.trains)


def _of_iteration(made: Turn, now_ms: int) -> Iterator[Line]:
    before, after = made.before.iteration, made.after.iteration
    if after is None:
        return
    what = {"at_ms": now_ms, "incarnation": made.after.incarnation, "iteration": after.plan.iteration}
    is_new = before is None or before.plan != after.plan
    if is_new:
        yield {"kind": "opened", **what}
    if Role.ACTOR in after.reports and (is_new or before is None or Role.ACTOR not in before.reports):
        yield {"kind": "reported", **what}


def _of_transitions(made: Turn, now_ms: int, observed: ev.OwnershipObserved | None) -> Iterator[Line]:
    before, after = made.before.transitions, made.after.transitions
    for name, transition in sorted(after.items()):
        if transition != before.get(name):
            yield {"kind": "step", "at_ms": now_ms, "transition": name, "states": _states(transition)}
    for transition in observed.transitions if observed else ():
        if transition.id in before and not transition.is_open:
            ends = {"job_ends": made.after.phase in OVER}
            yield {"kind": "closed", "at_ms": now_ms, **_transition(transition), **ends}


def _states(transition: Transition) -> dict[str, list[str]]:
    # Without GPUs, as at a change of layout alone, the state is that of the parts.
    states: dict[str, list[str]] = {} if transition.moves else {str(part.state): [] for part in transition.parts}
    for move in transition.moves:
        states.setdefault(str(move.state), []).append(move.gpu)
    return states


def _transition(transition: Transition) -> Line:
    return {
        "transition": transition.id,
        "incarnation": transition.incarnation,
        "outcome": str(transition.outcome),
        "reason": transition.reason,
        "moves": [
            {
                "gpu": move.gpu,
                "from": str(move.source.role) if move.source else None,
                "to": str(move.target.role) if move.target else None,
                "state": str(move.state),
            }
            for move in transition.moves
        ],
        "parts": [
            {
                "role": str(part.role),
                "kind": str(part.kind),
                "old_layout": str(part.old_layout) if part.old_layout else None,
                "new_layout": str(part.new_layout) if part.new_layout else None,
                "state": str(part.state),
            }
            for part in transition.parts
        ],
    }


def _decision(state: ClusterState, answer: PolicyAnswer, planned: list[cmd.PlanTransition], now_ms: int) -> Line:
    iteration, weighed, proposal = state.iteration, answer.weighed, answer.proposal
    placed = {str(role): proposal.placement[role] for role in Role if role in proposal.placement}
    line: Line = {
        "kind": "decision",
        "at_ms": now_ms,
        "incarnation": state.incarnation,
        "iteration": iteration.plan.iteration if iteration else None,
        "reason": proposal.reason,
        "placement": {role: len(each.gpus) if each else 0 for role, each in placed.items()},
        "trains": proposal.trains,
        "planned": [_planned(each.transition) for each in planned],
    }
    if weighed is not None:
        ends_at_ms = weighed.choice.ends_at_ms
        line["situation"] = _figures(weighed.situation)
        line["forecast_end_ms"] = ends_at_ms
        line["alternatives"] = [
            {"what": each.what, "end_s": round(each.end_s, 3), "is_chosen": each.is_chosen}
            for each in weighed.choice.alternatives
        ]
    return line


def _planned(transition: Transition) -> Line:
    (part,) = transition.parts
    return {
        "transition": transition.id,
        "role": str(part.role),
        "change": str(part.kind),
        "comes": [move.gpu for move in transition.moves if move.target],
        "leaves": [move.gpu for move in transition.moves if move.source],
        "layout": str(part.new_layout) if part.new_layout else None,
        "reason": transition.reason,
    }


def _figures(situation: Situation) -> Line:
    """The situation in short: counts, and the rates that a forecast rests on."""
    training, generation = situation.trainer.training, situation.generation
    return {
        "sequences": situation.num_sequences,
        "submitted": situation.num_submitted,
        "unfinished": situation.num_unfinished,
        "groups": generation.num_groups,
        "groups_ready": len(situation.inference.inferring.ready),
        "groups_taken": training.num_taken,
        "minibatches_done": training.num_minibatches_done,
        "minibatches": situation.spec.num_minibatches,
        "gpus": {
            "rollout": sum(len(engine.gpus) for engine in situation.engines),
            "actor": situation.trainer.num_gpus,
            "inference": len(situation.inference.gpus),
            "free": len(situation.free),
            "moving": len(situation.moving),
        },
        "rollout_tokens_per_s": round(sum(engine.rate_tokens_per_s for engine in situation.engines), 1),
        "inference_tokens_per_s_per_gpu": round(situation.inference_tokens_per_s_per_gpu, 1),
    }
