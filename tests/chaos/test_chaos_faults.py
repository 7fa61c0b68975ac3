"""What a fault may do to a job is told by what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults.files import CUT, Damage
from tests.chaos.faults.garbage import OnSubject
from tests.chaos.plan import plan_of
from tests.chaos.world import World

VARIANT = plan_of(0).variant
OF_CHECKPOINT = Damage(2, "checkpoints/inc*/manifest.json", CUT, 0.5)


def world_with(folder: Path, *checkpoints: str, damaged: tuple[str, ...]) -> World:
    world = World(VARIANT, "chaos", folder, None)
    for name in checkpoints:
        (world.root / "checkpoints" / name).mkdir(parents=True)
        (world.root / "checkpoints" / name / "manifest.json").touch()
    world.damaged.update(world.root / "checkpoints" / name / "manifest.json" for name in damaged)
    return world


ONE, TWO, LATER = "inc001-it000001", "inc001-it000002", "inc002-it000003"


@pytest.mark.parametrize(
    ("checkpoints", "damaged", "want"),
    [
        pytest.param((ONE,), (ONE,), True, id="the only one is damaged"),
        pytest.param((ONE, TWO), (TWO,), False, id="an older one is sound"),
        pytest.param((ONE, TWO), (TWO, ONE), True, id="both are damaged"),
        pytest.param((ONE, LATER), (TWO, ONE), False, id="a later one is sound"),
        pytest.param((ONE,), (), False, id="none is damaged"),
    ],
)
def test_a_resume_after_a_damaged_checkpoint_may_be_refused_only_where_no_sound_one_is_left(
    tmp_path: Path, checkpoints: tuple[str, ...], damaged: tuple[str, ...], want: bool
) -> None:
    assert OF_CHECKPOINT.may_refuse_in(world_with(tmp_path, *checkpoints, damaged=damaged)) == want


def test_other_damage_may_be_refused_whatever_checkpoints_there_are(tmp_path: Path) -> None:
    world = world_with(tmp_path, ONE, TWO, damaged=(TWO,))
    assert Damage(2, "config.json", CUT, 0.5).may_refuse_in(world) is False, "a cut one heals"
    assert Damage(2, "launcher.lock", CUT, 0.5).may_refuse_in(world) is True


def test_garbage_is_drawn_for_every_subject_that_a_stranger_can_write_on() -> None:
    faults = [each.fault for seed in range(60) for each in plan_of(seed, only="OnSubject").faults]
    subjects = {each.subject for each in faults if isinstance(each, OnSubject)}
    assert {"$KV.TG_TERM.store", "tg.state.{job}", "tg.dead.{job}", "tg.events.{job}"} <= subjects
