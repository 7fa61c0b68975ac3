"""Members that request different reshards do not begin one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import TypeAdapter

from tests.unit.elastic.fake_world import FakeWorld
from tidegate.elastic.agreement import Claim, MembersDisagree, agree
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.recovery import Origin, Version
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
        fields = {"name": claim.name, "source": claim.source, "target": claim.target} | dict(other)
        whole = (Version(2, 7, None),)
        return {2: CLAIM.dump_json(Claim(**fields, progress=NOTE.progress, versions=whole, notes={7: NOTE}))}  # type: ignore[arg-type]  # texts by name

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
