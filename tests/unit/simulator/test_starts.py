"""The best fixed split as a config to start from."""

from __future__ import annotations

from pathlib import Path

from simulator.best_split import split_seconds
from simulator.planning.starts import best_start, placed_only
from simulator.scenario_checks import gpus_of
from tests.unit.simulator.plans import job, raw_config, scenario
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.config.reading.layers import Layer, merge_layers
from tidegate.types import Role

LEAVES_TWO_OUT = {"component_placement": {"actor": "2-5", "rollout": "6-12", "inference": "13-15"}}


def gpus(config: JobConfig) -> set[str]:
    return {gpu for role in Role for gpu in config.placement(role)}


def test_both_starts_have_the_same_gpus(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, **LEAVES_TWO_OUT)
    raw["actor"]["layout"], raw["inference"]["layout"] = {"tp": 2, "dp": 2}, {"dp": 3}
    config = parse_config(raw)
    _, best = best_start(config, scenario(config))
    assert gpus(best.config) == gpus(config)
    assert len(gpus(config)) == 14


def test_a_job_can_start_with_the_best_split_when_its_keys_are_in_the_config(tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    found, best = best_start(job(tmp_path), scenario(job(tmp_path)))
    copied = merge_layers(Layer(raw, {}), Layer(best.keys(), {}), whole=frozenset()).values
    assert parse_config(copied) == best.config
    assert best.config.scheduler.static.order is found.order


def test_the_best_split_is_no_slower_than_the_configured_one(tmp_path: Path) -> None:
    own = scenario(job(tmp_path))
    found, _ = best_start(job(tmp_path), own)
    configured = [split_seconds(own, found.order, seed) for seed in found.seeds]
    assert found.seconds <= sum(configured) / len(configured)


def test_gpus_that_are_placed_nowhere_are_left_out_of_the_cluster(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, **LEAVES_TWO_OUT)
    raw["actor"]["layout"], raw["inference"]["layout"] = {"tp": 2, "dp": 2}, {"dp": 3}
    found = scenario(parse_config(raw))
    assert found.cluster.nodes == {"n0": 6, "n1": 8}
    assert [gpus_of(found, role) for role in (Role.ACTOR, Role.ROLLOUT, Role.INFERENCE)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9, 10],
        [11, 12, 13],
    ]
    assert placed_only(found) is found


def test_a_split_has_whole_copies_of_the_inference(tmp_path: Path) -> None:
    raw = raw_config(tmp_path)
    raw["inference"]["layout"] = {"tp": 2, "dp": 1}
    config = parse_config(raw)
    _, best = best_start(config, scenario(config))
    assert len(best.config.placement(Role.INFERENCE)) % 2 == 0
