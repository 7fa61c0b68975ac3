"""`tidegate simulate --replay`: a job's recorded events, and what policies decide on them. For people and programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from cli.rows import Form, Row, table, written
from services.scheduler.shell.codecs.state_codec import event_of
from services.scheduler.state import events as ev
from simulator.outcome import PolicyDecision
from simulator.policies import policies_by_name, requested_policies
from simulator.replay import Recorded, Replayed, replayed, section_of
from simulator.scenario import ScenarioError
from tidegate.codec import WireError
from tidegate.v1 import control_pb2

COLUMNS = ("policy", "at_s", "rollout", "actor", "inference", "reason")
FORMS = tuple(Form)
NS_PER_MS = 1_000_000


def output(args: argparse.Namespace) -> str:
    """ScenarioError for wrong input."""
    if args.config or args.seed is not None or args.assumptions or args.form not in FORMS:
        forms = f"{', '.join(FORMS[:-1])} or {FORMS[-1]}"
        raise ScenarioError(
            f"--replay takes --policy or --compare and -o {forms}: a job's events have no scenario, no seed and no "
            "assumptions"
        )
    recorded = _events(args.recorded)
    try:
        section = section_of(recorded)
    except ValueError as error:
        raise ScenarioError(f"--replay {args.replay}: {error}") from error
    spec = next(each.event.body.spec for each in recorded if isinstance(each.event.body, ev.JobSubmitted))
    policies = policies_by_name(requested_policies(args) or [section.policy], section, spec)
    found = [replayed(recorded, policy, name=name) for name, policy in policies.items()]
    if args.form != Form.TABLE:
        return written([_as_json(each) for each in found], Form(args.form))
    rows = [row for each in found for row in _rows(each)]
    still = [f"{each.policy} would have changed no assignment" for each in found if not each.decisions]
    parts = [table(rows, COLUMNS) if rows else "", "\n".join(still), "\n".join(_sums(found[0]))]
    return "\n\n".join(filter(None, parts))


def _events(rows: Iterable[control_pb2.ListEventsResponse]) -> tuple[Recorded, ...]:
    events = []
    for row in rows:
        try:
            event = event_of(row.event, stream_sequence=row.stream_sequence)
        except WireError as error:
            raise ScenarioError(
                f"event {row.stream_sequence}, {row.event.id}: {error}; replay it with the release that recorded it"
            ) from error
        events.append(Recorded(row.event.occurred_unix_ns // NS_PER_MS, event))
    return tuple(events)


def _rows(found: Replayed) -> list[Row]:
    return [
        {"policy": found.policy, "at_s": round(each.at_s, 2), **_num_gpus(each), "reason": each.reason}
        for each in found.decisions
    ]


def _num_gpus(decided: PolicyDecision) -> dict[str, int]:
    at = decided.assignment
    return {
        "rollout": sum(map(len, at.engines)),
        "actor": len(at.trainer.gpus) if at.trainer else 0,
        "inference": len(at.inference),
    }


def _sums(found: Replayed) -> Sequence[str]:
    summary = (
        f"{found.job}: {found.num_events} events, {len(found.commands)} commands to leads under the job's own policy; "
        f"{found.num_answered} of {found.num_answered + len(found.strange)} answers in the record are to one of them"
    )
    return (summary, *(f"not issued here: {name}" for name in found.strange[:3]))


def _as_json(found: Replayed) -> dict[str, object]:
    return {
        "job": found.job,
        "policy": found.policy,
        "num_events": found.num_events,
        "num_commands": len(found.commands),
        "num_answered": found.num_answered,
        "strange": list(found.strange),
        "decisions": _rows(found),
    }
