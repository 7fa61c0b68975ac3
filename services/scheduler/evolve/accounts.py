"""Accounts for an iteration's samples: sums the components' reports by ids, and supersedes iterations.

    generated = trained + filtered + discarded          in number and in digest of ids

Invariants:
- A job fails if the numbers of an iteration's samples do not add up. [test_lifecycle: samples_that_are_lost_fail]
- A job fails if the digests of the ids do not add up. [test_lifecycle: counted_twice_fail_the_job]
- A superseded iteration counts its trained samples as discarded, so its sums hold too.
  [test_losses: superseded_and_their_samples_discarded]
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import ComponentProgress, Iteration, Summary, newest
from services.scheduler.state.events import IterationReported
from services.scheduler.state.observed import Pictures
from services.scheduler.state.values import Fate, total
from tidegate.types import Role

SUPERSEDED = "incarnation_superseded"
ACCOUNTANTS = (Role.ROLLOUT, Role.ACTOR)
"""The accounts need the reports of the components that generate and that train."""


def summarize(state: ClusterState, iteration: Iteration) -> Summary:
    """The iteration according to its reports, complete or not."""
    reports = [iteration.reports[role] for role in Role if role in iteration.reports]
    metrics: dict[str, float] = {}
    for report in reports:
        metrics.update(report.metrics)
    return Summary(
        iteration=iteration.plan.iteration,
        incarnation=state.incarnation,
        version=iteration.plan.version,
        generated=total(report.generated for report in reports),
        trained=total(report.trained for report in reports),
        filtered=_by_reason(tuple(fate for report in reports for fate in report.filtered)),
        discarded=_by_reason(tuple(fate for report in reports for fate in report.discarded)),
        metrics=tuple(sorted(metrics.items())),
    )


def is_reported(iteration: Iteration) -> bool:
    return all(role in iteration.reports for role in ACCOUNTANTS)


def supersede(state: ClusterState, *, next_iteration: int) -> ClusterState:
    """The lineage continues from `next_iteration`: earlier iterations stay, later ones do not count any more.

    A checkpoint is saved only after its iteration's accounts add up. An open iteration before it is therefore complete.
    """
    summaries = tuple(
        _superseded(summary) if summary.iteration >= next_iteration and not summary.is_superseded else summary
        for summary in state.summaries
    )
    if (iteration := state.iteration) is not None:
        is_covered = iteration.plan.iteration < next_iteration and is_reported(iteration)
        summaries = (*summaries, summarize(state, iteration) if is_covered else _abandoned(state, iteration))
    return replace(state, summaries=newest(summaries), iteration=None, seen=Pictures())


def _superseded(summary: Summary) -> Summary:
    redone = Fate(SUPERSEDED, summary.trained.num_samples, summary.trained.ids_digest)
    discarded = _by_reason((*summary.discarded, redone))
    return replace(summary, trained=Fate(), discarded=discarded, is_superseded=True)


def _abandoned(state: ClusterState, iteration: Iteration) -> Summary:
    """The summary of an iteration that broke off.

    The rollout's report has the generated samples. Without a report, the rollout's last progress has the number of
    complete groups but no ids: the digest is then 0 on both sides.
    """
    summary = summarize(state, iteration)
    generated = summary.generated
    progress = state.progress.get(Role.ROLLOUT)
    if not generated.num_samples and progress and _is_about(progress, state, iteration):
        generated = Fate(num_samples=progress.num_done * iteration.plan.group_size)
    discarded = (replace(generated, reason=SUPERSEDED),) if generated.num_samples else ()
    return replace(summary, generated=generated, trained=Fate(), filtered=(), discarded=discarded, is_superseded=True)


def _is_about(progress: ComponentProgress, state: ClusterState, iteration: Iteration) -> bool:
    return (progress.incarnation, progress.iteration) == (state.incarnation, iteration.plan.iteration)


def _by_reason(fates: tuple[Fate, ...]) -> tuple[Fate, ...]:
    reasons = sorted({fate.reason for fate in fates})
    return tuple(total((fate for fate in fates if fate.reason == reason), reason=reason) for reason in reasons)


def with_report(iteration: Iteration, role: Role, report: IterationReported) -> Iteration:
    reports = {
        each: report if each is role else iteration.reports[each]
        for each in Role
        if each is role or each in iteration.reports
    }
    return replace(iteration, reports=reports)
