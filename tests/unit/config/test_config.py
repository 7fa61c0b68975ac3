"""The job's config: which GPUs it gives to each component, and what it takes."""

from __future__ import annotations

from tests.unit.config.valid_config import VALID, valid_with
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.types import Layout, Role


def test_a_placement_is_counted_over_the_nodes_in_order() -> None:
    config = parse_config(VALID)
    assert config.placement(Role.ROLLOUT) == ("n0/2", "n1/0")
    assert config.placement(Role.INFERENCE) == ("n1/1",)
    assert config.layout(Role.ACTOR) == Layout(dp=2)
    assert config.layout(Role.ROLLOUT) == Layout(dp=2)


def test_a_policy_that_moves_gpus_may_give_each_of_the_jobs_gpus_to_every_component() -> None:
    raw = valid_with("cluster.nodes", {"n0": 3, "n1": 4}) | {"scheduler": {"policy": "static"}}
    assert parse_config(raw).slots(Role.ROLLOUT) == ("n0/2", "n1/0")
    raw["rollout"] = {"standby": "0,5"}
    assert parse_config(raw).slots(Role.ROLLOUT) == ("n0/0", "n0/2", "n1/0", "n1/2")
    raw["rollout"] = {}
    raw["actor"]["standby"] = "6"
    assert parse_config(raw).slots(Role.ACTOR) == ("n0/0", "n0/1", "n1/3")
    everywhere = ("n0/0", "n0/1", "n0/2", "n1/0", "n1/1", "n1/3")
    assert parse_config(raw).gpus == everywhere
    raw["scheduler"] = {"policy": "tide"}
    assert [parse_config(raw).slots(role) for role in Role] == [everywhere] * 3


def test_the_actor_may_get_standby_gpus_besides_those_of_its_placement() -> None:
    raw = valid_with("cluster.nodes", {"n0": 3, "n1": 4})
    raw["actor"]["standby"] = "5-6"
    config = parse_config(raw)
    assert config.standby() == ("n1/2", "n1/3")
    assert not [warning for warning in config.warnings() if "to no component" in warning]


def test_json_and_back_is_the_same_config() -> None:
    config = parse_config(VALID)
    assert JobConfig.from_json(config.to_json()) == config


def test_sglang_may_run_more_requests_than_an_embedded_engine() -> None:
    sglang = {"engine": "sglang", "sglang": {"python": "bin/python"}, "max_running_requests": 1024}
    assert parse_config(valid_with("rollout", sglang)).rollout.max_running_requests == 1024
