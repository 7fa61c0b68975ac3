"""`tidegate simulate`: four forms of one result. Wrong input is reported before anything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from cli.__main__ import main
from tests import effort
from tests.unit.cli.configs import small_file

SCENARIO = """\
name: small
cluster:
  nodes: {n0: 4, n1: 4}
  placement: {actor: 0-1, rollout: 2-5, inference: 6-7}
algorithm: {prompts_per_iteration: 8, group_size: 4, n_minibatches: 2}
lengths: {median_tokens: 400, max_tokens: 2000}
physics: {law: published_fit}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    (path := tmp_path / "small.yaml").write_text(SCENARIO)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_policies_are_compared_in_one_table_with_the_bound(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, static, rlinf, empty, bound = printed(capsys, scenario, "--compare", "static,rlinf").splitlines()
    assert head.split()[:3] == ["POLICY", "SECONDS", "SPEEDUP"]
    assert static.split()[0] == "static"
    assert static.split()[2] == "1.000"
    assert rlinf.split()[0] == "rlinf"
    assert not empty
    assert bound.startswith("small, seed 0: no schedule ends before ")


def test_baselines_are_compared_with_policies_and_the_split_that_was_searched_is_told(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "phases_ordered,best_split,planned_once"
    output = printed(capsys, scenario, "--compare", names).splitlines()
    assert [line.split()[0] for line in output[1:4]] == names.split(",")
    assert output[-1].startswith("best_split: actor ")
    found = json.loads(printed(capsys, scenario, "--policy", "best_split", "-o", "json"))
    assert output[-1] == f"best_split: {found['notes']['best_split']}"


def test_json_says_the_same_again_for_the_same_seed_and_another_for_another(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (
        json.loads(printed(capsys, scenario, "--policy", "dynarl", "--seed", seed, "-o", "json")) for seed in "334"
    )
    assert first == again
    assert first["seed"] == 3
    assert first["bound_s"] != other["bound_s"]
    (policy,) = first["policies"]
    assert policy["num_lost"] == 0
    assert policy["num_samples"] == 32


def test_overrides_count_wherever_they_stand(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(
        printed(capsys, "name=other", scenario, "--policy", "static", "-o", "json", "costs.sync.fixed_s=7")
    )
    assert rows["scenario"] == "other"
    assert {row["key"]: row["value"] for row in rows["assumptions"]}["costs.sync.fixed_s"] == 7


def test_a_fault_of_an_engine_that_does_not_run_then_is_reported_by_its_policy(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = "faults=[{at_s: 1.5, kind: engine, engine: 99}]"
    last = printed(capsys, scenario, "--policy", "static", faults).splitlines()[-1]
    assert last.startswith("static: engine 99, which was to fail at 1.5 s, does not run then; 2 others do")


def test_a_policys_rules_are_the_scenarios(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The moves of collocated phases: three placements and the way home make three moves."""
    given = [[scenario, "--policy", "static", f"scheduler.static.collocated={on}"] for on in ("false", "true")]
    outputs = [printed(capsys, *arguments, "-o", "json") for arguments in given]
    assert [json.loads(text)["policies"][0]["num_moves"] for text in outputs] == [0, 3]


@pytest.mark.parametrize(("given", "want"), [([], "tide"), (["scheduler.policy=static"], "static")])
def test_the_policy_is_the_scenarios_or_tide(
    given: list[str], want: str, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(printed(capsys, scenario, "-o", "json", *given))["compared_with"] == want


def test_the_page_and_the_trace_are_whole_documents(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, scenario, "--compare", "static,dynarl", "-o", "html")
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    trace = json.loads(printed(capsys, scenario, "--compare", "static,dynarl", "-o", "perfetto"))
    assert set(trace["otherData"]) == {"static", "dynarl"}


def test_every_cost_is_listed_with_its_value_and_source_when_asked(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without = printed(capsys, scenario, "--policy", "static")
    output = printed(capsys, scenario, "--policy", "static", "--assumptions", "costs.trainer.exponent=0.3")
    assert "costs.trainer.exponent" not in without
    (line,) = [line for line in output.splitlines() if line.startswith("costs.trainer.exponent")]
    assert line.split()[1:6] == ["0.3", "given;", "by", "default", "0.4,"]


WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown key names the nearest": (
        ["costs.engine.max_runing=3"],
        "unknown key 'costs.engine.max_runing'; the nearest known key is 'max_running'",
    ),
    "an unknown policy names the nearest": (
        ["--policy", "dynrl"],
        "no policy is called 'dynrl'; the nearest is 'dynarl'",
    ),
    "a method that is no policy": (["--compare", "tide,probed"], "`python -m benchmarks.early_ends` compares it"),
    "an unknown policy among several": (["--compare", "static,flood"], "no policy is called 'flood' (known: static, "),
    "an unknown baseline names the nearest": (
        ["--compare", "phases,best_spilt"],
        "no policy is called 'best_spilt'; the nearest is 'best_split'",
    ),
    "a baseline compared with itself": (["--compare", "best_split,best_split"], "policy best_split is named twice"),
    "a search for a job that no component can start": (
        ["--policy", "best_split", "cluster.placement.inference=''"],
        "cluster.placement.inference has no GPUs",
    ),
    "a policy compared with itself": (["--compare", "static,static"], "policy static is named twice"),
    "a job that a policy cannot run": (
        ["--policy", "rlinf", "cluster.placement={actor: 0-2, rollout: 4-5, inference: 6-7}"],
        "rlinf: the actor's dp=3 does not divide 4 prompts a minibatch; legal dp: 1, 2, 4",
    ),
    "a negative duration": (["costs.switch.release_s=-1"], "costs.switch.release_s=-1: Input should be greater than"),
    "a GPU that two components have": (["cluster.placement.inference=5-6"], "names GPU 5, which rollout has already"),
    "GPUs that two components have": (
        ["cluster.placement.inference=2-7"],
        "cluster.placement.inference names GPUs 2-5, which rollout has already: list each GPU once [override",
    ),
    "GPUs that the cluster lacks": (
        ["cluster.placement.inference=6-90"],
        "cluster.placement.inference names GPUs 8-90, the cluster has 8 (0-7)",
    ),
    "a range of more GPUs than any cluster has": (
        ["cluster.placement.inference=0-90000000"],
        "'0-90000000' is not a list of GPUs like '0-3' or '0,2,5', each below 65,536",
    ),
    "a node of more GPUs than any cluster has": (
        ["cluster.nodes={n0: 4000000000}"],
        "cluster.nodes.n0=4000000000: Input should be less than or equal to 65536",
    ),
    "ranges of more GPUs than any cluster has": (
        ["cluster.placement.inference=0-65535,0-65535"],
        "cluster.placement.inference: '0-65535,0-65535' names more GPUs than the 65,536 that a cluster may have",
    ),
    "nodes of more GPUs than any cluster has": (
        ["cluster.nodes={n0: 65536, n1: 1}"],
        "cluster.nodes has 65,537 GPUs on 2 nodes, and a cluster at most 65,536: name fewer nodes, or fewer GPUs of",
    ),
    "a duration that is no number": (
        ["costs.switch.release_s=.nan"],
        "costs.switch.release_s=nan: Input should be a finite number",
    ),
    "a duration without end": (["lengths.environment_s=.inf"], "lengths.environment_s=inf: Input should be a finite"),
    "a node without a name": (["cluster.nodes={'': 8}"], "cluster.nodes names a node '': give it a name without '/'"),
    "more turns than anybody has": (["lengths.mean_turns=.inf"], "lengths.mean_turns=inf: Input should be less than"),
    "an efficiency with which nothing would end": (
        ["costs.trainer.layout_efficiency={dp2: 1.0e-300}"],
        "costs.trainer.layout_efficiency.dp2=1e-300: Input should be greater than or equal to 0.001",
    ),
    "more slots than responses": (
        ["costs.engine.max_running=1000000000"],
        "costs.engine.max_running=1000000000: Input should be less than or equal to 1000000",
    ),
    "a count that no number of a machine holds": (
        ["algorithm.prompt_tokens=" + "9" * 400],
        "algorithm.prompt_tokens is above 1,000,000,000,000,000, the largest count: lower it",
    ),
    "bytes that no number of a machine holds": (
        ["costs.sync.weight_bytes=" + "9" * 400],
        "costs.sync.weight_bytes is above 1,000,000,000,000,000, the largest count: lower it",
    ),
    "a model of more layers than can be planned": (
        ["model.num_layers=1000000"],
        "model.num_layers=1000000: Input should be less than or equal to 1000",
    ),
    "heads that do not divide": (["model.num_heads=3"], "model.num_heads=3 does not divide by model.num_kv_heads=4"),
    "a fault that never is": (
        ["faults=[{at_s: 1e300, kind: gpu, gpu: 0}]"],
        "faults.0.at_s=1e+300 is above 1,000,000 seconds: lower it",
    ),
    "a lengths file of a name that none has": (
        ['lengths={law: trace, file: "a\\0b"}'],
        "a\\x00b': embedded null byte; name a file of one line a prompt",
    ),
    "a physics that there is not": (["physics.law=newton"], "physics.law='newton': Input should be 'published_fit' or"),
    "an efficiency above 1": (
        ["physics.trainer.kernel_efficiency=1.2"],
        "physics.trainer.kernel_efficiency=1.2: Input should be less than or equal to 1",
    ),
    "a number of a physics that computes nothing": (
        ["physics.hardware=H20"],
        "physics.hardware is set, and physics.law=published_fit takes the times of costs: set physics.law=roofline, or",
    ),
    "an empty policy": (["--policy", ""], "no policy is called '' (known: static, "),
    "a policy left out of a list": (["--compare", "static,"], "no policy is called '' (known: static, "),
    "a lengths file that is not there": (
        ["lengths={law: trace, file: FOLDER/none.txt}"],
        "none.txt: No such file or directory; name a file of one line a prompt",
    ),
    "a lengths file that is a folder": (
        ["lengths={law: trace, file: FOLDER}"],
        ": Is a directory; name a file of one line a prompt",
    ),
    "a lengths file that is no text": (
        ["lengths={law: trace, file: FOLDER/bytes}"],
        "bytes is no text: invalid start byte; name a file of one line a prompt",
    ),
    "a lengths file without a line": (
        ["lengths={law: trace, file: FOLDER/empty}"],
        "empty has 0 prompts and algorithm.prompts_per_iteration=8: make them the same",
    ),
    "a fault with a field of another kind": (
        ["faults=[{at_s: 1, kind: engine, engine: 0, gpu: 2}]"],
        "faults.0.gpu does not belong to kind=engine: leave it out [override faults]",
    ),
    "a GPU that the cluster lacks": (["cluster.placement.inference=6-8"], "names GPU 8, the cluster has 8 (0-7)"),
    "a component without GPUs": (["cluster.placement.inference=''"], "cluster.placement.inference has no GPUs"),
    "a lengths file with a bad line": (["lengths={law: trace, file: TRACE}"], "lengths.txt:2: '4x' is no response"),
    "a seed below 0": (["--seed", "-1"], "--seed: '-1' is not a whole number from 0 to 4294967295; `tidegate simulate"),
    "a seed that is no number": (["--seed", "x"], "--seed: 'x' is not a whole number from 0 to 4294967295"),
    "a seed of thousands of digits": (["--seed", "9" * 5000], "is not a whole number from 0 to 4294967295"),
    "a form that there is not": (["-o", "svg"], "-o: 'svg' is not one of table, json, yaml, html, perfetto"),
    "an option that there is not": (["--fast"], "simulate takes no --fast; `tidegate simulate --help` lists"),
    "a policy and several": (["--policy", "tide", "--compare", "static,tide"], "not allowed with argument --policy"),
    "two scenarios": (["other.yaml"], "2 scenarios (SCENARIO, other.yaml): name one YAML file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_with_exit_code_2_and_nothing_else(
    case: str, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "lengths.txt"
    trace.write_text("1 2 3 4\n1 2 3 4x\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("# none\n")
    arguments, want = WRONG[case]
    given = [word.replace("TRACE", str(trace)).replace("FOLDER", str(tmp_path)) for word in arguments]
    assert main(["simulate", scenario, *given]) == 2
    said = capsys.readouterr()
    assert want.replace("SCENARIO", scenario) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_an_iteration_that_does_not_end_is_reported_by_its_policy_with_exit_code_1(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node loss takes all of the rollout's GPUs."""
    faults = ", ".join(f"{{at_s: 1, kind: gpu, gpu: {gpu}}}" for gpu in range(2, 6))
    assert main(["simulate", scenario, "--policy", "static", f"faults=[{faults}]"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("tidegate: the iteration does not end under static: after ")
    assert said.out == ""


def test_overrides_alone_are_no_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "seed=1"]) == 2
    assert "no scenario: name one YAML file" in capsys.readouterr().err


def test_a_jobs_config_is_no_scenario_and_the_command_for_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_file(tmp_path)
    assert main(["simulate", str(path)]) == 2
    want = f"tidegate: {path} is a job's config and no scenario: `tidegate plan {path}` simulates its iteration\n"
    assert capsys.readouterr().err == want


def test_blanks_between_policies_are_left_out(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, scenario, "--compare", "static, rlinf", "-o", "json"))
    assert [each["policy"] for each in found["policies"]] == ["static", "rlinf"]


@pytest.mark.parametrize(
    ("case", "form"),
    effort.cases(
        product(["nobody reads", "the disk is full"], ["table", "html"]),
        always=[("nobody reads", "table"), ("the disk is full", "html")],
    ),
)
def test_an_output_that_takes_nothing_ends_with_1_and_no_traceback(case: str, form: str, scenario: str) -> None:
    """A table is written at the end, a page at once."""
    if case == "nobody reads":
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "cli", "simulate", scenario, "--policy", "static", "-o", form]
    ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(out)
    message = (
        "tidegate: [Errno 28] No space left on device: the output is incomplete; make room, and run the command again\n"
    )
    assert (ended.returncode, ended.stderr) == (1, "" if case == "nobody reads" else message)
