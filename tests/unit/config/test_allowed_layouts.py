"""`actor.layouts`: which layouts it gives to a policy, and what of it is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.component_bench import job_config
from tidegate.config.checks.actor_layouts import policy_layouts
from tidegate.config.checks.layouts import replicas_fault
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.job import load_job
from tidegate.types import Layout, Role


def configured(tmp_path: Path, *layouts: dict[str, int], **changes: Any) -> JobConfig:
    """A job of 6 GPUs on two nodes, with 4 samples a minibatch and 2 layers, 2 heads."""
    actor = {"layouts": list(layouts), **changes.pop("actor", {})}
    return job_config(tmp_path, actor=actor, scheduler={"policy": "tide"}, **changes)


def test_a_kind_of_copies_without_dp_comes_in_every_number_that_fits_the_gpus_and_the_minibatch(
    tmp_path: Path,
) -> None:
    assert policy_layouts(configured(tmp_path)) == ()
    assert policy_layouts(configured(tmp_path, {"tp": 2})) == tuple(Layout(tp=2, dp=dp) for dp in (1, 2, 3))
    assert policy_layouts(configured(tmp_path, {"pp": 2, "dp": 2}, {})) == (
        Layout(pp=2, dp=2),
        *(Layout(dp=dp) for dp in (1, 2, 3, 4)),
    ), "5 copies cannot share 4 samples"
    shards = configured(tmp_path, {"pp": 2}, actor={"num_logical_shards": 2})
    assert policy_layouts(shards) == (Layout(pp=2), Layout(pp=2, dp=2)), "3 copies do not divide 2 shards"


def test_a_layout_that_a_policy_may_choose_has_no_fault_that_the_configured_one_would_have(tmp_path: Path) -> None:
    config = configured(tmp_path, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {})
    job, found = load_job(config), policy_layouts(config)
    assert len(found) == 3 + 3 + 1 + 4
    assert [layout for layout in found if job.layout_fault(Role.ACTOR, layout)] == []
    assert [layout for layout in found if replicas_fault(layout, num_samples=4, num_shards=None)] == []


WRONG: dict[str, tuple[list[dict[str, int]], dict[str, Any], str]] = {
    "an unknown axis": ([{"tq": 2}], {}, "unknown key 'actor.layouts.0.tq'; the nearest known key is 'tp'"),
    "no size": ([{"tp": 0}], {}, "actor.layouts.0.tp=0: Input should be greater than"),
    "chunks without stages": ([{"vpp": 2}], {}, "layout vpp=2 with pp=1: Megatron interleaves stages only"),
    "more ranks than GPUs": (
        [{"tp": 2}, {"tp": 2, "dp": 4}],
        {},
        "actor.layouts.1: layout tp2-dp4 has 8 ranks, and the job has 6 GPUs in cluster.component_placement and "
        "actor.standby",
    ),
    "more copies than samples": (
        [{"dp": 5}],
        {},
        "actor.layouts.0: layout dp5 does not fit: dp=5 replicas cannot share a minibatch of 4 samples",
    ),
    "copies that do not divide the shards": (
        [{"pp": 2, "dp": 3}],
        {"num_logical_shards": 4},
        "actor.layouts.0: layout pp2-dp3 does not fit: dp=3 does not divide actor.num_logical_shards=4; "
        "legal dp: 1, 2, 4",
    ),
    "experts that no number of copies shares": (
        [{"ep": 8}],
        {},
        "actor.layouts.0: ep=8 divides dp * cp = dp * 1 for no dp that fits the minibatch and the job's 6 GPUs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layout_is_refused_by_its_place_before_the_model_is_read(tmp_path: Path, name: str) -> None:
    layouts, actor, want = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, *layouts, actor=actor)
    assert want in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}])
def test_another_tp_or_cp_is_refused_in_reproducible_mode(tmp_path: Path, layout: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"is not the tp=1 cp=1 of actor.layout, and actor.num_logical_shards=4 keeps"
    ):
        configured(tmp_path, layout, actor={"num_logical_shards": 4})
    configured(tmp_path, {"pp": 2}, actor={"num_logical_shards": 4})


def test_a_layout_that_the_model_does_not_fit_is_refused_in_the_words_of_the_configured_one(tmp_path: Path) -> None:
    asked = load_job(job_config(tmp_path)).layout_fault(Role.ACTOR, Layout(tp=4))
    with pytest.raises(ConfigError) as refused:
        load_job(configured(tmp_path, {"tp": 2}, {"tp": 4}))
    assert str(refused.value) == f"actor.layouts: {asked}"
    assert "num_heads % tp = 2 % 4 = 2, must be 0; legal tp: 1, 2" in str(asked)


@pytest.mark.parametrize(
    ("scheduler", "want"),
    [
        ({"policy": "static"}, "leaves the actor in actor.layout"),
        ({"policy": "rlinf"}, "changes dp alone, as RLinf does"),
        ({"policy": "static", "static": {"collocated": True}}, ""),
        ({"policy": "dynarl"}, ""),
        ({"policy": "tide"}, ""),
    ],
)
def test_a_policy_that_chooses_none_of_them_is_told(tmp_path: Path, scheduler: dict[str, Any], want: str) -> None:
    raw = configured(tmp_path, {"tp": 2}).model_dump(mode="json") | {"scheduler": scheduler}
    told = [each for each in parse_config(raw).warnings() if each.startswith("actor.layouts")]
    assert [want in each for each in told] == ([True] if want else [])
