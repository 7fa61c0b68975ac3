"""`tidegate plan` predicts a job's iteration under each policy and from several placements, and starts nothing."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.__main__ import main
from services.scheduler.policy.registry import policy_of
from simulator.cost_model import SyncCosts
from simulator.iteration import SimulatedIteration
from simulator.job_scenario import (
    COST_KEYS,
    LENGTH_KEYS,
    basis_of_calibration,
    basis_of_config,
    scenario_of,
)
from simulator.model import ModelSection
from simulator.planning.starts import AS_CONFIGURED, BEST_SPLIT, best_start, placed_only
from simulator.run import simulate
from simulator.scenario import parse_scenario
from simulator.scenario_sections import MicroBatchSection
from tests.unit.cli.configs import small, small_config, small_file
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.config.sections.scheduler import POLICIES
from tidegate.pace.costs import SYNC_S
from tidegate.types import Layout

EIGHT = {"nodes": {"n0": 8}, "component_placement": {"actor": "0-3", "rollout": "4-6", "inference": 7}}
SIXTEEN = {"nodes": {"n0": 16}, "component_placement": {"actor": "0-1", "rollout": "2-13", "inference": "14-15"}}


def eight(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    raw = small(tmp_path, cluster=EIGHT, **changes)
    raw["algorithm"] |= {"prompts_per_iteration": 12, "n_minibatches": 3}
    raw["actor"]["layout"] = {"tp": 2, "dp": 2}
    return raw


def planned(folder: Path, *more: str) -> str:
    """What `tidegate plan` prints for eight GPUs."""
    raw = eight(folder)
    path = small_file(folder, **{key: raw[key] for key in ("cluster", "algorithm", "actor")})
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", str(path), *more]) == 0
    return out.getvalue()


@dataclass(frozen=True)
class Plans:
    """Each plan is made once."""

    folder: Path
    _made: dict[tuple[str, ...], str] = field(default_factory=dict)

    def text(self, *more: str) -> str:
        if more not in self._made:
            self._made[more] = planned(self.folder, *more)
        return self._made[more]

    def value(self, *more: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text("-o", "json", *more))
        return loaded

    def assumptions(self, *more: str) -> dict[str, dict[str, Any]]:
        return {row["key"]: row for row in self.value(*more)["assumptions"]}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    return Plans(tmp_path_factory.mktemp("plans"))


CALIBRATED = """
cluster: {nodes: {n0: 1}, placement: {rollout: 0}}
algorithm: {prompt_tokens: 7}
lengths: {median_tokens: 9, min_tokens: 1, max_tokens: 64}
physics: {law: published_fit}
costs: {engine: {gpus_per_engine: 1}, trainer: {fixed_s: 0.25}}
"""


@pytest.fixture(scope="module")
def of_calibration(plans: Plans) -> dict[str, dict[str, Any]]:
    """The assumptions of the plan with a calibrated scenario."""
    (path := plans.folder / "fitted.yaml").write_text(CALIBRATED)
    return plans.assumptions("--calibrated", str(path))


UPDATE_S = "assumptions.costs.update_s=0.5"


def gpus_of(config: JobConfig) -> list[str]:
    placement = config.cluster.component_placement
    return [placement.actor, placement.rollout, placement.inference]


def test_the_scenario_has_the_jobs_work_and_what_its_config_assumes(tmp_path: Path) -> None:
    assumptions = {"costs": {"update_s": 0.5, "trainer_exponent": 0.9}, "lengths": {"median_tokens": 12}}
    config = small_config(tmp_path, assumptions=assumptions)
    scenario = scenario_of(config, basis_of_config(config, ModelSection()))
    assert (scenario.costs.trainer.fixed_s, scenario.costs.trainer.exponent) == (0.5, 0.9)
    assert (scenario.lengths.median_tokens, scenario.lengths.max_tokens) == (12, 60)
    assert (scenario.algorithm.prompts_per_iteration, scenario.algorithm.group_size) == (2, 2)
    assert scenario.costs.engine.gpus_per_engine == 1


def test_a_job_on_modelled_slots_has_their_sync_and_the_micro_batches_of_its_actor(tmp_path: Path) -> None:
    raw = small(tmp_path)
    raw["actor"]["streams_minibatches"] = False
    plain = parse_config(raw)
    found = scenario_of(plain, basis_of_config(plain, None, token_cost=7))
    assert (found.costs.sync, found.costs.engine.fresh_prefill_share) == (SyncCosts(), 0.25)
    assert (found.algorithm.micro_batches, found.algorithm.streams) == (None, False)
    raw["cluster"]["pace"] = {"cores_per_slot": 0.01}
    raw["actor"] |= {"max_tokens_per_microbatch": 64, "streams_minibatches": True}
    paced = parse_config(raw)
    found = scenario_of(paced, basis_of_config(paced, None, token_cost=7))
    assert (found.costs.sync.sync_s, found.costs.engine.fresh_prefill_share) == (SYNC_S, 1.0)
    assert found.algorithm.micro_batches == MicroBatchSection(max_tokens=64, token_cost=7)
    assert found.algorithm.streams


def test_prompts_have_the_tokens_of_the_task_or_of_the_calibrated_run(
    plans: Plans, of_calibration: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    want = {"key": "prompt_tokens", "value": 5, "source": "the task's prompts"}
    assert plans.assumptions()["prompt_tokens"] == want
    assert of_calibration["prompt_tokens"]["value"] == 7
    (path := tmp_path / "fitted.yaml").write_text(CALIBRATED.replace("prompt_tokens: 7", "prompt_tokens: 0"))
    source = plans.assumptions("--calibrated", str(path))["prompt_tokens"]["source"]
    assert source.startswith("0.20 of what")


def test_a_reproducible_job_is_predicted_with_numbers_of_copies_that_divide_its_shards(tmp_path: Path) -> None:
    """A minibatch has 6 sequences, so without shards dynarl grows the trainer to 6 copies."""
    raw = small(tmp_path, cluster=SIXTEEN)
    raw["algorithm"] |= {"prompts_per_iteration": 24, "group_size": 2, "n_minibatches": 8, "max_new_tokens": 50}
    raw["actor"]["layout"], raw["inference"] = {"dp": 2}, {"layout": {"dp": 2}}
    found: dict[int | None, set[int]] = {}
    for num_shards in (None, 8):
        raw["actor"]["num_logical_shards"] = num_shards
        config = parse_config(raw)
        scenario = scenario_of(config, basis_of_config(config, ModelSection()))
        assert SimulatedIteration(scenario, scenario.seed).spec.num_logical_shards == num_shards
        run = simulate(scenario, policy_of(config.scheduler.model_copy(update={"policy": "dynarl"})), name="dynarl")
        trainers = (each.assignment.trainer for each in run.decisions)
        found[num_shards] = {trainer.layout.dp for trainer in trainers if trainer}
    assert found == {None: {2, 6}, 8: {2, 4}}


def test_a_job_is_predicted_with_the_layouts_that_its_policies_may_choose(tmp_path: Path) -> None:
    raw = eight(tmp_path)
    raw["actor"]["layouts"] = [{"tp": 1, "dp": 3}, {"pp": 2, "dp": 2}]
    config = parse_config(raw)
    scenario = scenario_of(config, basis_of_config(config, ModelSection()))
    assert SimulatedIteration(scenario, scenario.seed).spec.layouts == (Layout(dp=3), Layout(pp=2, dp=2))
    _, best = best_start(config, placed_only(scenario))
    assert best.config.actor.layouts == config.actor.layouts


def test_every_policy_is_predicted_from_every_placement_relative_to_static_as_configured(plans: Plans) -> None:
    output = plans.value()
    assert [row["policy"] for row in output["predictions"]] == [*POLICIES] * 2
    assert [row["placement"] for row in output["predictions"][:: len(POLICIES)]] == [AS_CONFIGURED, BEST_SPLIT]
    first = output["predictions"][0]
    assert (first["placement"], first["policy"], first["saved_percent"]) == (AS_CONFIGURED, "static", 0.0)
    assert output["best"]["iteration_s"] <= first["iteration_s"]
    assert output["best_static"]["policy"] == "static"
    assert not (plans.folder / "jobs").exists()


def test_a_policy_that_cannot_run_has_the_reason_in_its_row_and_once_below(plans: Plans) -> None:
    output = plans.text(UPDATE_S)
    (row,) = [line for line in output.splitlines() if line.startswith("the best split") and "rlinf" in line]
    assert row.split()[-2:] == ["-", "-"]
    assert "not from the best split: rlinf: the actor's dp=3 does not divide 4 prompts a minibatch" in output


def test_each_assumption_has_its_origin(plans: Plans) -> None:
    output = plans.text(UPDATE_S)
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.startswith("assumptions.")}
    assert lines["assumptions.costs.update_s"][1:] == ["0.5", "override", "assumptions.costs.update_s"]
    assert lines["assumptions.costs.communicators_s"][1:] == ["0.37", "default"]
    assert "`tidegate calibrate` fits them to a run of the job" in output


def test_reshards_are_priced_by_the_bytes_of_the_jobs_model_and_unused_keys_are_not_listed(plans: Plans) -> None:
    """A model of two layers moves in no time at the published rate. At a byte a second it takes far too long."""
    fast, slowed = plans.value(), plans.value("assumptions.costs.reshard_bytes_per_s=1000")
    (quick_s, slow_s) = (
        {row["policy"]: row["iteration_s"] for row in output["predictions"][:4]} for output in (fast, slowed)
    )
    assert slow_s["static"] == quick_s["static"], "nothing moves"
    assert slow_s["dynarl"] > quick_s["dynarl"] + 1
    rows = plans.assumptions()
    assert not {f"assumptions.costs.{name}" for name in ("reshard_s", "weight_bytes", "optimizer_bytes")} & rows.keys()
    assert "assumptions.costs.reshard_bytes_per_s" in rows
    size = rows["model.num_parameters"]
    assert size["source"] == "the config's, in fp32"
    assert 2 * 4 * 16 * 16 < size["value"] < 20_000, "the layers' weights, norms and a vocabulary of the task's words"


def test_seconds_of_a_reshard_in_the_config_replace_its_bytes(plans: Plans) -> None:
    rows = plans.assumptions("assumptions.costs.reshard_s=9")
    assert rows["assumptions.costs.reshard_s"]["value"] == 9
    assert "assumptions.costs.reshard_bytes_per_s" not in rows
    assert rows["model.num_parameters"] == {
        "key": "model.num_parameters",
        "value": None,
        "source": "each reshard takes reshard_s: assumptions.costs.reshard_s is set",
    }


def test_for_a_missing_model_each_reshard_takes_the_assumed_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = eight(tmp_path, model={"path": str(tmp_path / "nowhere"), "max_seq_len": 80})
    path = small_file(tmp_path, **{key: raw[key] for key in ("cluster", "algorithm", "actor", "model")})
    assert main(["plan", str(path), "-o", "json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["assumptions"]}
    assert rows["assumptions.costs.reshard_s"]["value"] == 1.25
    output = rows["model.num_parameters"]
    assert output["value"] is None
    assert output["source"].startswith("each reshard takes reshard_s: ")
    assert str(tmp_path / "nowhere") in output["source"]


def test_every_assumption_of_a_config_is_one_of_its_scenarios(tmp_path: Path) -> None:
    """Except for the two sizes that policies price reshards with, which the model gives here."""
    config = small_config(tmp_path)
    own = {"costs": COST_KEYS.values(), "lengths": LENGTH_KEYS.values()}
    for section, keys in own.items():
        known = set(type(getattr(config.assumptions, section)).model_fields) - {"weight_bytes", "optimizer_bytes"}
        assert sorted(keys) == sorted(known)


def test_reshards_move_the_model_of_a_calibrated_scenario(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    raw = {
        "physics": {"law": "published_fit"},
        "cluster": {"nodes": {"n0": 2}, "placement": {"rollout": "0-1"}},
        "model": {"num_layers": 4},
        "lengths": {"min_tokens": 1},
        "costs": {"engine": {"gpus_per_engine": 1}},
    }
    for given, want in ((raw, ModelSection(num_layers=4)), (raw | {"model": None}, None)):
        assert scenario_of(config, basis_of_calibration(parse_scenario(given))).model == want


def test_a_calibrated_scenarios_costs_and_lengths_stand_in_place_of_the_assumptions(
    of_calibration: dict[str, dict[str, Any]],
) -> None:
    assert of_calibration["costs.trainer.fixed_s"]["value"] == 0.25
    assert of_calibration["lengths.median_tokens"] == {
        "key": "lengths.median_tokens",
        "value": 9.0,
        "source": "the calibrated scenario",
    }


def test_the_same_config_gives_the_same_plan(plans: Plans) -> None:
    assert planned(plans.folder, "-o", "json") == plans.text("-o", "json")


def test_a_plan_answers_what_split_gains_asynchrony_and_needs_are(plans: Plans) -> None:
    output = plans.value()
    placed = output["best_split"]["keys"]["cluster"]["component_placement"]
    row = output["predictions"][len(POLICIES)]
    assert placed == {name: row[name] for name in ("actor", "rollout", "inference")}
    assert output["gain"]["low"] <= output["gain"]["median"] <= output["gain"]["high"]
    assert output["gain"]["cases"][0]["split_s"] == pytest.approx(row["iteration_s"], abs=0.01)
    assert output["gain"]["cases"][0]["tide_s"] == pytest.approx(output["predictions"][7]["iteration_s"], abs=0.01)
    assert [way["way"] for way in output["asynchrony"]["ways"]][1:] == ["tide (strict)", "ends_old", "computes_cache"]
    assert output["needs"][0]["size_bytes"] > 6e9
    assert output["spare_slots"] == {"needed": 0, "in_no_placement": 0}
    assert output["physics"]["law"] == "published_fit"
    assert len(output["searched"]["best_split_seeds"]) == 2


def test_times_are_computed_for_the_gpu_that_is_named(plans: Plans) -> None:
    output = plans.value("--hardware", "H100", "--staleness", "0")
    assert (output["physics"]["law"], output["physics"]["hardware"]) == ("roofline", "H100")
    rows = {row["key"]: row for row in output["assumptions"]}
    assert rows["physics.shape.hidden_size"] == {
        "key": "physics.shape.hidden_size",
        "value": 16,
        "source": "the job's model",
    }
    assert rows["physics.trainer.recompute"]["source"] == "actor.recompute of the config"
    assert rows["physics.memory.weight_bytes"]["source"] == "actor.precision of the config"
    assert rows["costs.engine.step_base_s"]["source"] == "computed by physics.law=roofline"
    assert output["asynchrony"] == {"staleness": 0, "refused": "--staleness 0 asks for none", "ways": []}


def test_a_wrong_config_of_plan_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, scenario = str(small_file(tmp_path)), str(tmp_path / "scenario.yaml")
    Path(scenario).write_text("cluster: {nodes: {n0: 1}, placement: {rollout: 0}}\nlenths: {}\n")
    (fits_not := tmp_path / "other.yaml").write_text(
        "cluster: {nodes: {n0: 2}, placement: {rollout: 0-1}}\nphysics: {law: published_fit}\n"
    )
    (computed := tmp_path / "computed.yaml").write_text(
        "name: x\ncluster: {nodes: {n0: 2}, placement: {rollout: 0-1}}\nphysics: {law: roofline}\n"
    )
    nowhere = {"path": str(tmp_path / "nowhere"), "max_seq_len": 80}
    (unseen := tmp_path / "unseen.yaml").write_text(json.dumps(small(tmp_path, model=nowhere)))
    for words, want in (
        ([path, "--staleness", "-1"], "--staleness -1 is outside 0 to 8, the iterations by which a rollout may run"),
        ([path, "--hardware", "H10"], "--hardware 'H10' is no known GPU; the nearest is 'H100' (known: H100, H200, "),
        ([path, "--hardware", "H100", "--calibrated", path], "--hardware H100 computes the times that --calibrated"),
        (
            [str(unseen), "--hardware", "H100"],
            "--hardware H100 needs the shape of the job's model, and it is not known: ",
        ),
        ([path, "--calibrated", str(computed)], "scenario x has physics.law=roofline, and a calibrated scenario has"),
        ([path, "--calibrated", str(fits_not)], f"{fits_not} does not fit job small: cluster.placement.rollout has 1"),
        (
            [path, "assumptions.costs.decode_base_s=0"],
            "assumptions.costs.decode_base_s=0.0: Input should be greater than 0 [override assumptions.costs.decode_ba",
        ),
        (
            [path, "assumptions.costs.update_s=1e300"],
            "assumptions.costs.update_s=1e+300 is above 1,000,000 seconds: nothing would end [override assumptions.cos",
        ),
        (
            [path, "assumptions.costs.inference_tokens_per_s=1e-9"],
            "assumptions.costs.inference_tokens_per_s='1e-9': Input should be greater than or equal to 0.001 [override",
        ),
        (
            [path, "cluster.nodes={}"],
            "cluster.nodes has no node: name one with its GPUs, such as {n0: 8} [override cluster.nodes]",
        ),
        ([path, "assumptions.costs.updates_s=1"], "the nearest known key is 'update_s'"),
        ([path, "assumptions.costs.update_s=-1"], "assumptions.costs.update_s=-1: Input should be greater"),
        (["seed=1"], "no config to override; name a YAML file before key=value"),
        ([path, "--calibrated", str(tmp_path / "none.yaml")], "No such file"),
        ([path, "--calibrated", path], f"{path} is a job's config and no scenario"),
        ([scenario], f"{scenario} is a scenario and not a job's config: run `tidegate simulate {scenario}`"),
    ):
        assert main(["plan", *words]) == 2
        said = capsys.readouterr()
        assert want in said.err
        assert said.out == ""


def test_the_keys_of_the_best_split_are_written_for_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "split.yaml"
    best = json.loads(planned(tmp_path, "-o", "json", "--write", str(written)))["best_split"]["keys"]
    assert yaml.safe_load(written.read_text()) == best
    raw = eight(tmp_path)
    path = small_file(tmp_path, **{key: raw[key] for key in ("cluster", "algorithm", "actor")})
    assert main(["run", str(path), str(written), "--dry-run", "-o", "json"]) == 0
    started = json.loads(capsys.readouterr().out)
    assert started["cluster"]["component_placement"] == {
        role: str(gpus) for role, gpus in best["cluster"]["component_placement"].items()
    }
    assert main(["plan", str(path), "--write", str(written)]) == 2
    assert f"{written} is there already: name a new file" in capsys.readouterr().err
