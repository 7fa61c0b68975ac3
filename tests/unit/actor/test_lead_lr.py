"""The learning rate in the actor's lead: over minibatches, in checkpoints and after a resume."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.actor.checkpoints import Checkpoint, CheckpointStore
from services.actor.ledger import SampleLedger
from services.actor.lr import LrUpdate, ledger_of, passed_budget
from tests.component_bench import job_config
from tests.unit.actor.actor_bench import SECOND, Training, training
from tidegate.checkpoint_manifest import MANIFEST, read_manifest
from tidegate.lr.errors import BudgetMismatch, RanksDisagree
from tidegate.lr.progress import LrLedger, LrRules
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.types import Layout
from tidegate.v1 import workers_pb2 as wire

LINEAR = {"decay": "linear", "minimum": 1e-4}
BUDGET = 6
"""The budget of the bench's job: 3 iterations of 2 minibatches."""


def rate(step: int) -> float:
    return LrSchedule(1e-3, budget=BUDGET, decay=Decay.LINEAR, minimum=1e-4).rate(step)


async def one_iteration(of: Training, iteration: int, *, incarnation: int = 1, **scored: Any) -> dict[str, float]:
    """Run one iteration. Returns the metrics of its report."""
    first = 4 * iteration
    await of.scored(range(first, first + 4), incarnation=incarnation, iteration=iteration, version=iteration, **scored)
    of.take(of.bench.open_iteration(iteration, incarnation=incarnation))
    of.close(iteration, incarnation=incarnation)
    await of.bench.published("weights_published", count=iteration + 1 + incarnation)
    *_, report = await of.bench.published("iteration_reported", count=iteration + 1)
    return dict(report.iteration_reported.metrics)


def rates(of: Training) -> list[float]:
    return [train.learning_rate for train in of.ranks.same().trained]


async def test_the_rate_falls_by_one_step_per_minibatch_and_the_report_has_the_progress(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR}) as of:
        of.take(of.bench.scale_up())
        for iteration in range(3):
            metrics = await one_iteration(of, iteration)
        assert rates(of) == [rate(step) for step in range(6)]
        want = {"lr": rate(5), "lr_progress": 6, "lr_budget": 6, "lr_nominal": 6, "lr_updates": 6}
        want |= {"lr_skipped": 0, "lr_shortfall": 0, "lr_overshoot": 0}
        assert {name: metrics[name] for name in want} == want


@pytest.mark.parametrize(("policy", "want_steps", "want_shortfall"), [("hold", 2, 2), ("advance", 4, 0)])
async def test_filtered_minibatches_hold_or_advance_the_schedule_as_configured(
    policy: str, want_steps: int, want_shortfall: int, tmp_path: Path
) -> None:
    schedule = LINEAR | {"empty_batch": policy}
    async with training(tmp_path, algorithm={"filter_zero_std": True}, actor={"lr_schedule": schedule}) as of:
        of.take(of.bench.scale_up())
        await one_iteration(of, 0, rewards=(1.0, 1.0))
        metrics = await one_iteration(of, 1, rewards=(0.0, 1.0))
        assert rates(of) == [rate(want_steps - 2), rate(want_steps - 1)]
        assert (metrics["lr_progress"], metrics["lr_shortfall"]) == (want_steps, want_shortfall)
        assert (metrics["lr_nominal"], metrics["lr_updates"]) == (4, 2)


async def test_an_empty_minibatch_that_passes_the_budget_gives_the_only_warning(tmp_path: Path) -> None:
    schedule = LINEAR | {"empty_batch": "advance", "budget_updates": 1}
    with capture_logs() as lines:
        async with training(tmp_path, algorithm={"filter_zero_std": True}, actor={"lr_schedule": schedule}) as of:
            of.take(of.bench.scale_up())
            await one_iteration(of, 0, rewards=(1.0, 1.0))
            await one_iteration(of, 1, rewards=(0.0, 1.0))
    (warning,) = (line for line in lines if line["event"] == "learning rate")
    assert "progress is 2 of a budget of 1 steps" in warning["message"]


async def test_planned_minibatches_that_no_group_filled_count_as_empty(tmp_path: Path) -> None:
    algorithm = {"filter_zero_std": True, "max_extra_prompts": 1}
    async with training(tmp_path, algorithm=algorithm, actor={"lr_schedule": LINEAR}) as of:
        await of.scored(range(3), rewards=(0.0, 0.0))
        await of.scored([3, 4], rewards=(0.0, 1.0))
        of.start()
        metrics = (await of.report()).metrics
        assert (metrics["lr_progress"], metrics["lr_shortfall"], metrics["lr_nominal"]) == (1, 1, 2)


@pytest.mark.parametrize(("policy", "want_steps"), [("advance", [0, 1]), ("hold", [0, 0])])
async def test_a_non_finite_update_advances_or_holds_the_schedule_as_configured(
    policy: str, want_steps: list[int], tmp_path: Path
) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR | {"on_skip": policy}}) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.fail_next(1)
        metrics = await one_iteration(of, 0)
        assert rates(of) == [rate(step) for step in want_steps]
        assert (metrics["lr_skipped"], metrics["lr_updates"], metrics["lr_nominal"]) == (1, 1, 2)


async def resumed_after_one(of: Training) -> None:
    """Run an iteration, end its actor, and make the lead of the next incarnation."""
    old = of.take(of.bench.scale_up())
    await one_iteration(of, 0)
    await old.aclose()
    of.bench.new_lead()


async def test_a_resume_goes_on_with_the_rates_of_the_run_that_was_never_interrupted(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR}) as of:
        await resumed_after_one(of)
        saved = CheckpointStore(of.bench.folder.checkpoints, keep=2).load("inc001-it000001").lr
        assert saved is not None
        assert (saved.progress, saved.num_updates, saved.next_batch) == (Fraction(2), 2, 2)
        of.take(of.bench.scale_up(of.bench.grants(term=2), incarnation=2, checkpoint="inc001-it000001"))
        metrics = await one_iteration(of, 1, incarnation=2)
        assert rates(of) == [rate(2), rate(3)]
        assert metrics["lr_progress"] == 4


def without_ledger(of: Training) -> None:
    """Change the checkpoint to the format before the learning-rate ledger."""
    folder = of.bench.folder.checkpoints / "inc001-it000001"
    raw = read_manifest(folder)
    del raw["lr"]
    (folder / MANIFEST).write_text(json.dumps(raw | {"format": 2}))


async def test_a_checkpoint_without_a_ledger_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR}) as of:
        await resumed_after_one(of)
        without_ledger(of)
        of.take(of.bench.scale_up(of.bench.grants(term=2), incarnation=2, checkpoint="inc001-it000001"))
        (failed,) = await of.bench.published("failed")
        assert "num_steps=2 of lr_decay_steps=6 have no unit" in failed.failed.message


@pytest.mark.parametrize("policy", ["rebase", "clamp", "keep"])
async def test_a_checkpoint_without_a_ledger_is_adopted_by_the_configured_policy(policy: str, tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR | {"legacy_policy": policy}}) as of:
        await resumed_after_one(of)
        without_ledger(of)
        of.ranks.marks.clear()  # the ranks' files predate the ledger too
        of.take(of.bench.scale_up(of.bench.grants(term=2), incarnation=2, checkpoint="inc001-it000001"))
        await one_iteration(of, 1, incarnation=2)
        assert rates(of) == [rate(2), rate(3)]


MISMATCHES: dict[str, tuple[str, int]] = {"the config's": ("config", 99), "the checkpoint's": ("checkpoint", BUDGET)}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_resume_under_another_budget_uses_the_chosen_one(case: str, tmp_path: Path) -> None:
    choice, want_budget = MISMATCHES[case]
    saved = ledger_of(job_config(tmp_path, actor={"lr_schedule": LINEAR}), None)
    checkpoint = Checkpoint(1, 1, Layout(), SampleLedger(1), (), LrUpdate(saved, "1.0.0", 4).committed)
    asked = LINEAR | {"budget_updates": 99}
    with pytest.raises(BudgetMismatch, match=r"6 steps, of which 1 are done, and the config one of 99"):
        ledger_of(job_config(tmp_path, actor={"lr_schedule": asked}), checkpoint)
    chosen = job_config(tmp_path, actor={"lr_schedule": asked | {"budget_mismatch": choice}})
    ledger = ledger_of(chosen, checkpoint)
    assert (ledger.schedule.budget, ledger.num_steps, ledger.mark) == (want_budget, 1, "1 steps after 1 updates")


async def test_a_rank_whose_state_is_of_other_progress_ends_the_job_with_both_numbers(tmp_path: Path) -> None:
    async with training(tmp_path) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.of[SECOND].strays = True
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        (failed,) = await of.bench.published("failed")
        assert failed.failed.fatal
        want = "ranks hold different progress (ranks [0]: 1 steps after 1 updates; ranks [1]: 9 steps after 9 updates)"
        assert want in failed.failed.message
        assert of.journal() == []


def test_ranks_that_agree_on_other_progress_than_the_ledgers_are_refused() -> None:
    update = LrUpdate(LrLedger(LrSchedule(1e-3, budget=6), LrRules(4)), "1.0.0", 4)
    reports = [wire.UpdateReport(committed=True, lr_mark="2 steps after 2 updates")] * 2
    with pytest.raises(
        RanksDisagree, match="ranks hold 2 steps after 2 updates and the ledger 1 steps after 1 updates"
    ):
        update.check(reports)


async def test_a_rank_whose_optimizer_has_another_rate_than_the_ledger_ends_the_job_with_both(tmp_path: Path) -> None:
    async with training(tmp_path, actor={"lr_schedule": LINEAR}) as of:
        of.take(of.bench.scale_up())
        await of.bench.published("weights_published")
        of.ranks.of[SECOND].rate_factor = 0.5
        await of.scored(range(4))
        of.take(of.bench.open_iteration())
        (failed,) = await of.bench.published("failed")
        assert failed.failed.fatal
        want = "the optimizers should have the learning rate 0.001, and rank 1 has 0.0005: resume from a checkpoint"
        assert want in failed.failed.message
        assert of.journal() == []


def test_optimizers_that_agree_on_another_rate_than_the_ledgers_are_refused_and_the_first_few_named() -> None:
    update = LrUpdate(LrLedger(LrSchedule(1e-3, budget=6), LrRules(4)), "1.0.0", 4)
    mark = update.committed.mark
    reports = [wire.UpdateReport(committed=True, lr_mark=mark, learning_rates=[2e-3])] * 6
    with pytest.raises(
        RanksDisagree, match=r"rate 0.001, and rank 0 has 0.002, rank 1 .* 3 has 0.002 and 2 more ranks have another"
    ):
        update.check(reports)
    update.check([wire.UpdateReport(committed=True, lr_mark=mark, learning_rates=[1e-3])] * 6)


def test_a_skipped_update_leaves_the_optimizers_their_rate_and_is_refused_where_it_differs() -> None:
    update = LrUpdate(LrLedger(LrSchedule(1e-3, budget=6), LrRules(4)), "1.0.0", 4)
    reports = [wire.UpdateReport(learning_rates=[rate]) for rate in (0.5, 0.5)]
    update.check(reports)
    with pytest.raises(RanksDisagree, match=r"rate 0.5, and rank 2 has 0.25 and 0.5"):
        update.check([*reports, wire.UpdateReport(learning_rates=[0.25, 0.5])])


def test_the_end_of_the_budget_gives_one_warning() -> None:
    ledger = LrLedger(LrSchedule(1e-3, budget=2, decay=Decay.LINEAR, minimum=1e-4), LrRules(4))
    warnings = []
    for number in range(5):
        before, ledger = ledger, LrUpdate(ledger, str(number), 4).committed
        warnings.append(passed_budget(before, ledger))
    assert [bool(warning) for warning in warnings] == [False, False, True, False, False]
    assert "progress is 3 of a budget of 2 steps: updates from here on have rate 0.0001" in str(warnings[2])
