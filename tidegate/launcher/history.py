"""The iterations and evaluations of a job, from the events in its folder.

The scheduler's state holds the newest of them only, and is gone with its store. The events hold them all, over every
start of the job. The lineage is what the scheduler says: all iterations before the one that comes next.

Invariants:
- An iteration that was done again counts once, by its later account. [test_history: done_again_counts_once]
- What is after the scheduler's next iteration does not count: it will be done again.
  [test_history: what_comes_after_the_next_iteration]
- A job whose state is lost has the iterations that it had before. [test_history: older_than_the_state_come_from]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.launcher.event_file import read_events
from tidegate.v1 import control_pb2, events_pb2, types_pb2

_NS_PER_S = 1e9
_ACCOUNTANTS = (types_pb2.ROLE_ROLLOUT, types_pb2.ROLE_ACTOR)
"""Without the reports of both, an iteration has no account."""
_KINDS = ("weights_loaded", "iteration_reported", "evaluation_reported")
_Key = tuple[int, int]
"""(iteration or version, incarnation)"""
_Reports = dict[types_pb2.Role.ValueType, events_pb2.IterationReported]


@dataclass(frozen=True, slots=True)
class History:
    """What the events tell, in order of (iteration or version, incarnation), whether it counts or not.

    `seconds` are those of each iteration, up to the actor's report.

    An iteration begins at the report of the iteration before. The first iteration of an incarnation begins when each
    component that loads its weights has done so once. GPUs that come within the iteration load them again.
    """

    seconds: Mapping[int, float] = field(default_factory=dict)
    iterations: tuple[control_pb2.IterationSummary, ...] = ()
    evaluations: tuple[control_pb2.EvaluationSummary, ...] = ()


def read_history(path: Path) -> History:
    """The history in a file of events. Empty where there is no file. OSError."""
    return history_of(row.event for row in read_events(path, kinds=_KINDS)) if path.exists() else History()


def history_of(events: Iterable[events_pb2.Event]) -> History:
    """`events`: in order, of all starts of the job."""
    told = [event for event in events if event.WhichOneof("body") in _KINDS]
    reports: dict[_Key, _Reports] = {}
    evaluations: dict[_Key, control_pb2.EvaluationSummary] = {}
    for event in told:
        match event.WhichOneof("body"):
            case "iteration_reported":
                reports.setdefault((event.iteration, event.incarnation), {})[event.role] = event.iteration_reported
            case "evaluation_reported":
                # A version is evaluated once in an incarnation, whoever reports it again.
                key = event.evaluation_reported.version, event.incarnation
                evaluations.setdefault(key, _evaluation(event))
    return History(
        seconds=iteration_seconds(told),
        iterations=tuple(
            _account(*key, of) for key, of in sorted(reports.items()) if all(role in of for role in _ACCOUNTANTS)
        ),
        evaluations=tuple(row for _, row in sorted(evaluations.items())),
    )


def with_history(status: control_pb2.GetJobResponse, history: History) -> control_pb2.GetJobResponse:
    """The scheduler's report with the whole lineage. The rows that the report has are taken as they are."""
    whole = control_pb2.GetJobResponse()
    whole.CopyFrom(status)
    del whole.iterations[:], whole.evaluations[:]
    accounts = {row.iteration: row for row in history.iterations if row.iteration < status.iteration}
    accounts |= {row.iteration: row for row in status.iterations}
    whole.iterations.extend(row for _, row in sorted(accounts.items()))
    results = {row.version: row for row in history.evaluations if row.version <= status.iteration}
    results |= {row.version: row for row in status.evaluations}
    whole.evaluations.extend(row for _, row in sorted(results.items()))
    return whole


def _account(iteration: int, incarnation: int, reports: _Reports) -> control_pb2.IterationSummary:
    own = [reports[role] for role in sorted(reports)]
    generated, trained = _total(each.generated for each in own), _total(each.trained for each in own)
    filtered = _total(fate for each in own for fate in each.filtered)
    discarded = _total(fate for each in own for fate in each.discarded)
    missing = generated - trained - filtered - discarded
    return control_pb2.IterationSummary(
        iteration=iteration,
        incarnation=incarnation,
        num_generated=generated,
        num_trained=trained,
        num_filtered=filtered,
        num_discarded=discarded,
        num_duplicates=max(0, -missing),
        num_lost=max(0, missing),
        metrics={name: value for each in own for name, value in each.metrics.items()},
    )


def _total(fates: Iterable[types_pb2.Fate]) -> int:
    return sum(fate.num_samples for fate in fates)


def _evaluation(event: events_pb2.Event) -> control_pb2.EvaluationSummary:
    body = event.evaluation_reported
    return control_pb2.EvaluationSummary(
        version=body.version,
        incarnation=event.incarnation,
        num_prompts=body.num_prompts,
        samples_per_prompt=body.samples_per_prompt,
        metrics=dict(body.metrics),
    )


def iteration_seconds(events: Iterable[events_pb2.Event]) -> dict[int, float]:
    """As `History.seconds`."""
    seconds: dict[int, float] = {}
    began_ns: dict[int, int] = {}
    with_reports: set[int] = set()
    loaded: set[tuple[int, int]] = set()
    """(incarnation, role) of the components that have loaded weights."""
    for event in events:
        at_ns, incarnation = event.occurred_unix_ns, event.incarnation
        match event.WhichOneof("body"):
            case "weights_loaded" if incarnation not in with_reports and (incarnation, event.role) not in loaded:
                began_ns[incarnation] = at_ns
                loaded.add((incarnation, event.role))
            case "iteration_reported" if event.role == types_pb2.ROLE_ACTOR:
                seconds[event.iteration] = (at_ns - began_ns.get(incarnation, at_ns)) / _NS_PER_S
                began_ns[incarnation] = at_ns
                with_reports.add(incarnation)
    return seconds
