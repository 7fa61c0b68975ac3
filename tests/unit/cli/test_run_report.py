"""The outputs of runs for people and other programs: figures, a page, a trace, all from the same spans."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cli.simulation.run_report import as_json, as_page, as_trace
from simulator.summary import summaries
from tests.unit.simulator.runs import GPUS, SCENARIO, run, scenario
from tidegate.timeline_page.page import rendered

RUNS = [run("static", end_s=10.0), run("tide", end_s=8.0)]


def page_data(document: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_figures_are_relative_to_the_first_policy_and_the_bound() -> None:
    static, tide = summaries(RUNS)
    assert (static.speedup, tide.speedup) == (1.0, 1.25)
    assert (static.over_bound_percent, tide.over_bound_percent) == pytest.approx((100.0, 60.0))


def test_shares_of_gpu_time_add_up_to_100_percent_in_one_order_for_all() -> None:
    static, tide = summaries(RUNS)
    want = ["generating", "inferring", "training", "switching", "waiting", "free"]
    assert list(static.state_percent) == list(tide.state_percent) == want
    assert sum(tide.state_percent.values()) == pytest.approx(100.0, abs=1e-9)
    assert static.state_percent["waiting"] == 25.0


def test_json_has_each_policys_figures_decisions_and_every_assumption() -> None:
    output = as_json(scenario(), RUNS)
    assert json.loads(json.dumps(output)) == output
    assert [each["policy"] for each in output["policies"]] == ["static", "tide"]
    want: dict[str, object] = {"at_s": 8 / 3, "rollout_gpus": 0, "actor_gpus": 2, "inference_gpus": 1}
    want |= {"predicted_end_s": 9.5, "reason": "the tail is thin"}
    assert output["policies"][1]["decisions"] == [want]
    assert (output["compared_with"], output["bound_s"]) == ("static", 5.0)
    assert all(row["source"] for row in output["assumptions"])


def test_an_assumption_that_the_scenario_gives_says_so_beside_its_default() -> None:
    other = scenario().model_validate(SCENARIO | {"costs": {"trainer": {"exponent": 0.3}}})
    rows = {row["key"]: row for row in as_json(other, RUNS)["assumptions"]}
    assert rows["costs.trainer.exponent"]["value"] == 0.3
    assert rows["costs.trainer.exponent"]["source"].startswith("given; by default 0.4, A: sublinear")
    assert rows["costs.trainer.fixed_s"]["source"].startswith("A: ")


def test_a_traces_spans_fill_each_gpus_time_exactly() -> None:
    trace = as_trace(RUNS)
    for each in RUNS:
        other = trace["otherData"][each.policy]
        assert {sum(lengths.values()) for lengths in other["state_ns"].values()} == {other["wall_ns"]}
        assert list(other["state_ns"]) == list(GPUS)
    processes = {
        event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    }
    assert list(processes.values()) == ["static n0", "static n1", "tide n0", "tide n1"]
    (end_us,) = {
        event["ts"] + event["dur"]
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] in (3, 4) and event["ts"] + event["dur"] > 7e6
    }
    assert end_us == 8e6


def test_a_trace_has_decisions_with_their_reasons() -> None:
    output = [event for event in as_trace(RUNS)["traceEvents"] if event["ph"] == "i"]
    assert [(event["pid"], event["ts"]) for event in output] == [
        (1, pytest.approx(10e6 / 3)),
        (3, pytest.approx(8e6 / 3)),
    ]
    assert output[0]["args"] == {"reason": "the tail is thin", "predicted_end_s": 9.5}


def test_a_page_needs_nothing_besides_itself() -> None:
    document = rendered(as_page(scenario(), RUNS))
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?:", document)
    assert "default-src 'none'" in document


def test_a_pages_lanes_are_the_spans_and_gpus_alike_are_written_once() -> None:
    data = page_data(rendered(as_page(scenario(), RUNS)))
    static, tide = data["strips"]
    assert (static["gpus"], static["nodes"]) == (list(GPUS), ["n0", "n0", "n1", "n1"])
    states = data["states"]
    read = [(lane["gpus"], lane["at"], [states[at] for at in lane["state"]]) for lane in tide["lanes"]]
    assert read == [
        ([0, 1], [0, 2666, 4000], ["generating", "switching", "training"]),
        ([2], [0], ["waiting"]),
        ([3], [0, 1000], ["inferring", "free"]),
    ]
    assert [static["end"], tide["end"]] == [10_000, 8_000]


def test_a_pages_marks_are_decisions_minibatches_and_the_bound_in_order() -> None:
    marks = page_data(rendered(as_page(scenario(), RUNS)))["strips"][0]["marks"]
    want = [[3333, "decision"], [5000, "reference"], [10_000, "boundary"]]
    assert [mark[:2] for mark in marks] == want
    assert marks[2][2] == "minibatch 1 ends, 1,234 tokens"


def test_no_reason_can_end_a_pages_script_or_begin_a_tag() -> None:
    reason = "</script><script>alert(1)</script><!-- & <b>"
    document = rendered(as_page(scenario(), [run("tide", reason=reason)]))
    assert document.count("</script>") == 2
    assert "<b>" not in document
    assert page_data(document)["strips"][0]["marks"][0][2] == reason


def test_a_page_without_its_script_has_every_figure_in_tables() -> None:
    tables = "".join(re.findall(r"<table>.*?</table>", rendered(as_page(scenario(), RUNS)), re.DOTALL))
    for want in ("8.0", "1.250", "60.0", "the tail is thin", "costs.trainer.exponent"):
        assert f">{want}<" in tables
