"""What became of an iteration's samples: reports added up by ids, iterations closed, iterations superseded.

Invariants: an iteration's accounts are in only when generated = trained + filtered + discarded, in number and in digest
of ids; superseding moves what was trained to discarded, so that the sums hold in the final lineage too.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.course import Iteration, Summary
from services.scheduler.state.events import IterationReported
from services.scheduler.state.observed import Seen
from services.scheduler.state.values import Fate, total
from tidegate.types import Role

SUPERSEDED = "incarnation_superseded"
ACCOUNTANTS = (Role.ROLLOUT, Role.ACTOR)
"""Whose reports the accounts need: who generates, and who trains."""


def summarize(state: ClusterState, iteration: Iteration) -> Summary:
    """The iteration as its reports tell it, whatever they are."""
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
    """The lineage goes on from `next_iteration`: what was done from there on does not count any more, what comes before
    stays. A checkpoint is saved only once its iteration's accounts add up, so an open iteration before it is whole."""
    summaries = tuple(
        _superseded(summary) if summary.iteration >= next_iteration and not summary.is_superseded else summary
        for summary in state.summaries
    )
    if (iteration := state.iteration) is not None:
        is_covered = iteration.plan.iteration < next_iteration and is_reported(iteration)
        summaries = (*summaries, summarize(state, iteration) if is_covered else _abandoned(state, iteration))
    return replace(state, summaries=summaries, iteration=None, seen=Seen())


def _superseded(summary: Summary) -> Summary:
    redone = Fate(SUPERSEDED, summary.trained.num_samples, summary.trained.ids_digest)
    discarded = _by_reason((*summary.discarded, redone))
    return replace(summary, trained=Fate(), discarded=discarded, is_superseded=True)


def _abandoned(state: ClusterState, iteration: Iteration) -> Summary:
    """An iteration that broke off. What it generated is told by the rollout's report, else by its last progress, which
    counts complete groups and knows no ids: then the digest is 0 on both sides."""
    summary = summarize(state, iteration)
    generated = summary.generated
    seen = state.progress.get(Role.ROLLOUT)
    if not generated.num_samples and seen and _is_about(state, iteration, seen_at=(seen.incarnation, seen.iteration)):
        generated = Fate(num_samples=seen.num_done * iteration.plan.group_size)
    gone = (replace(generated, reason=SUPERSEDED),) if generated.num_samples else ()
    return replace(summary, generated=generated, trained=Fate(), filtered=(), discarded=gone, is_superseded=True)


def _is_about(state: ClusterState, iteration: Iteration, *, seen_at: tuple[int, int]) -> bool:
    return seen_at == (state.incarnation, iteration.plan.iteration)


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
