"""The demo's runs: which jobs it starts, what it repeats, and what it says of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cli.demo import COMPARED, comparison, demo_configs, gpu_time_percent, run_all, summary_row
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.launcher.claim import Start
from tidegate.launcher.outcome import End, Outcome
from tidegate.types import MinibatchOrder
from tidegate.v1 import control_pb2


@dataclass
class Runs:
    """Ends each job as told, at once, and leaves the files that a run leaves."""

    ends: dict[str, End] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    started: list[tuple[str, Start]] = field(default_factory=list)
    now_ns: int = 1_700_000_000_000_000_000

    def __call__(self, config: JobConfig, start: Start) -> Outcome:
        self.started.append((config.job, start))
        folder = JobFolder.of(config)
        folder.root.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(config.to_json())
        self._touch(folder.config)
        trace = folder.root / "timeline.json"
        trace.write_text(json.dumps({"otherData": {"state_ns": {"n0/0": {"idle": 1, "training": 3}}}}))
        job = control_pb2.GetJobResponse(job=config.job, final_checksum=self.checksums.get(config.job, "same"))
        outcome = Outcome(
            end=self.ends.get(config.job, End.FINISHED),
            message="",
            seed=config.seed,
            wall_s=50.0 + self.seconds.get(config.job, 10.0),
            job=job,
            timeline=str(trace),
            seconds={0: self.seconds.get(config.job, 10.0)},
        )
        outcome.write(folder.result)
        self._touch(folder.result)
        return outcome

    def _touch(self, path: Path) -> None:
        self.now_ns += 1_000_000_000
        os.utime(path, ns=(self.now_ns, self.now_ns))


def configs_in(folder: Path, **overrides: Any) -> list[JobConfig]:
    return demo_configs(COMPARED, {"output_dir": str(folder), **overrides})


def test_the_runs_of_a_demo_differ_in_policy_and_name_alone(tmp_path: Path) -> None:
    static, tide, _ = configs_in(tmp_path, seed=3)
    assert (static.scheduler.policy, tide.scheduler.policy) == ("static", "tide")
    assert (static.job, tide.job, tide.seed) == ("demo-static", "demo", 3)
    named = tide.scheduler.model_copy(update={"policy": "static"})
    assert static == tide.model_copy(update={"job": "demo-static", "scheduler": named})


def test_the_third_differs_in_order_and_length_from_the_second(tmp_path: Path) -> None:
    _, tide, arrival = configs_in(tmp_path)
    orders = (tide.algorithm.minibatch_order, arrival.algorithm.minibatch_order)
    assert orders == (MinibatchOrder.FIXED, MinibatchOrder.ARRIVAL)
    assert arrival.algorithm.iterations < tide.algorithm.iterations
    own = {"minibatch_order": MinibatchOrder.FIXED, "iterations": tide.algorithm.iterations}
    algorithm = arrival.algorithm.model_copy(update=own)
    assert tide == arrival.model_copy(update={"job": "demo", "algorithm": algorithm})


def test_a_fresh_demo_runs_static_and_then_tide_in_place_of_earlier_runs(tmp_path: Path) -> None:
    runs = Runs()
    shown = run_all(COMPARED, configs_in(tmp_path), runs)
    assert runs.started == [(job, Start.FORCE) for job in ("demo-static", "demo", "demo-arrival")]
    assert [each.policy for each in shown] == ["static", "tide", "tide"]


def test_a_run_that_does_not_finish_ends_the_demo(tmp_path: Path) -> None:
    runs = Runs(ends={"demo-static": End.INTERRUPTED})
    shown = run_all(COMPARED, configs_in(tmp_path), runs)
    assert runs.started == [("demo-static", Start.FORCE)]
    assert shown[-1].outcome.end is End.INTERRUPTED
    assert summary_row(shown)["policy"] == "static"


def test_a_resumed_demo_repeats_no_finished_run(tmp_path: Path) -> None:
    runs = Runs(ends={"demo": End.INTERRUPTED})
    run_all(COMPARED, configs_in(tmp_path), runs)
    runs.started, runs.ends = [], {}
    shown = run_all(COMPARED, configs_in(tmp_path), runs, resume=True)
    want = [("demo", Start.RESUME), ("demo-arrival", Start.FORCE)]
    assert runs.started == want
    assert summary_row(shown)["static_wall_s"] == 60.0
    run_all(COMPARED, configs_in(tmp_path), runs, resume=True)
    assert runs.started == want


def test_a_resumed_demo_takes_no_run_of_an_earlier_demo_for_its_own(tmp_path: Path) -> None:
    runs = Runs()
    run_all(COMPARED, configs_in(tmp_path), runs)
    runs.started, runs.ends = [], {"demo-static": End.INTERRUPTED}
    run_all(COMPARED, configs_in(tmp_path, seed=1), runs)
    runs.ends = {}
    run_all(COMPARED, configs_in(tmp_path, seed=1), runs, resume=True)
    want = [("demo-static", Start.FORCE), ("demo-static", Start.RESUME), ("demo", Start.FORCE)]
    assert runs.started == [*want, ("demo-arrival", Start.FORCE)]


def test_the_last_line_has_the_figures_of_both_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(seconds={"demo-static": 20.0, "demo": 15.0, "demo-arrival": 12.0})
    shown = run_all(COMPARED, configs_in(tmp_path), runs)
    row = summary_row(shown)
    assert (row["policy"], row["moves"], row["switch_s_median"]) == ("tide", 0, None)
    assert (row["wall_s"], row["static_wall_s"]) == (65.0, 70.0)
    assert (row["iterations_s"], row["static_iterations_s"], row["arrival_iterations_s"]) == (15.0, 20.0, 12.0)
    assert row["gpu_time_pct"] == {"idle": 25.0, "training": 75.0}
    text = "\n".join(comparison(shown))
    assert "20.0 s under static, 15.0 s under tide (0.75 of it), with the same weights" in text
    assert "12.0 s under tide in arrival order (0.60 of static in fixed order)" in text
    assert "static: job demo-static" in capsys.readouterr().out


def test_the_comparison_says_when_the_weights_differ(tmp_path: Path) -> None:
    checksums = {"demo": "0f", "demo-static": "1e", "demo-arrival": "2d"}
    shown = run_all(COMPARED, configs_in(tmp_path), Runs(checksums=checksums))
    assert "DIFFERENT weights: 0f, 1e" in "\n".join(comparison(shown)), "a run in another order has other weights"


def test_the_arrival_run_is_compared_with_the_same_iterations_of_the_others(tmp_path: Path) -> None:
    shown = run_all(COMPARED, configs_in(tmp_path), Runs())
    static, tide, arrival = [
        replace(each, outcome=replace(each.outcome, seconds=dict(enumerate(seconds))))
        for each, seconds in zip(shown, ([30.0, 20.0, 9.0], [20.0, 15.0, 5.0], [15.0, 10.0]), strict=True)
    ]
    *_, last = comparison([static, tide, arrival])
    assert last == (
        "the first 2 iterations: 50.0 s under static and 35.0 s under tide in fixed order, 25.0 s under tide in "
        "arrival order (0.50 of static in fixed order)"
    )


def test_a_run_without_a_trace_has_no_shares_of_time() -> None:
    outcome = Outcome(end=End.FAILED, message="", seed=0, wall_s=0.0, job=control_pb2.GetJobResponse())
    assert gpu_time_percent(outcome) == {}
