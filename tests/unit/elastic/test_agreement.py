"""Members that request different reshards do not begin one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import TypeAdapter

from tests.unit.elastic.fake_world import FakeWorld
from tidegate.elastic.agreement import Claim, MembersDisagree, PortionSizes, PortionsRefused, agree
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.recovery import Origin, Version
from tidegate.elastic.state.catalogue import Announcement
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.sources import Sources
from tidegate.elastic.state.stamp import Note
from tidegate.types import Layout

SOURCE = Mesh(Layout(), (2,), even_chunks(2, pp=1))
TARGET = Mesh(Layout(), (1,), even_chunks(2, pp=1))
CLAIM = TypeAdapter(Claim)
NOTE = Note(Progress(num_updates=7, num_samples=70))


def standing_by(name: str, other: Mapping[str, object]) -> FakeWorld:
    """Member 1 stands by. Member 2 holds the state and claims the same, with these differences."""

    def answers(payload: bytes) -> dict[int, bytes]:
        if not payload:
            return {2: b""}
        claim = CLAIM.validate_json(payload)
        fields = {name: getattr(claim, name) for name in ("name", "source", "target", "portions")} | dict(other)
        whole = (Version(2, 7, None),)
        return {2: CLAIM.dump_json(Claim(**fields, progress=NOTE.progress, versions=whole, notes={7: NOTE}))}

    return FakeWorld(1, answers)


def sources() -> Sources:
    return Sources(StateLocation(1, SOURCE, {}, None), 1, {1: "a", 2: "a"}, ArenaReader())


def test_members_with_one_request_agree_on_the_newest_whole_update() -> None:
    world = standing_by("1", {})

    agreement = agree("1", sources(), TARGET, Progress(num_updates=5), world.as_world())

    assert (agreement.note, agreement.origins, agreement.newest) == (NOTE, {2: Origin(2, None)}, NOTE.progress)


@pytest.mark.parametrize("other", [{"name": "2"}, {"target": "another layout"}, {"source": "another epoch"}])
def test_different_requests_are_refused(other: dict[str, object]) -> None:
    world = standing_by("1", other)

    with pytest.raises(MembersDisagree, match="the members request different reshards"):
        agree("1", sources(), TARGET, Progress(), world.as_world())


def test_members_agree_to_carry_the_portions_that_the_ranks_of_the_source_hold() -> None:
    world = standing_by("1", {"portions": PortionSizes(carried=(8, 4), held=(8, 4))})

    agreement = agree("1", sources(), TARGET, Progress(), world.as_world(), portions=PortionSizes(carried=(8, 4)))

    assert agreement.note == NOTE


def test_requests_to_carry_different_portions_are_refused() -> None:
    world = standing_by("1", {"portions": PortionSizes(carried=(8,), held=(8,))})

    with pytest.raises(MembersDisagree, match="the members request different reshards"):
        agree("1", sources(), TARGET, Progress(), world.as_world())


@pytest.mark.parametrize("held", [(), (8,), (8, 4, 4), (8, 5)], ids=["none", "fewer", "more", "others"])
def test_portions_that_a_rank_does_not_hold_are_refused(held: tuple[int, ...]) -> None:
    world = standing_by("1", {"portions": PortionSizes(carried=(8, 4), held=held)})

    with pytest.raises(PortionsRefused, match=r"to carry 2 portions of \(8, 4\) samples"):
        agree("1", sources(), TARGET, Progress(), world.as_world(), portions=PortionSizes(carried=(8, 4)))


def test_a_dead_rank_holds_no_portions() -> None:
    location = StateLocation(1, Mesh(Layout(dp=2), (2, 3), even_chunks(2, pp=1)), {3: Announcement("b", {}, {})}, None)
    portions = PortionSizes(carried=(8,), held=(8,))
    world = standing_by("1", {"portions": portions})

    with pytest.raises(PortionsRefused, match=r"\{3: \(\)\}"):
        agree(
            "1",
            Sources(location, 1, {1: "a", 2: "a"}, ArenaReader()),
            TARGET,
            Progress(),
            world.as_world(),
            portions=PortionSizes(carried=(8,)),
        )
