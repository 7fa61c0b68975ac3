"""What the members of an epoch agree on before a reshard: what is asked, and the state that it starts from.

Each says what it was asked and what it can give of the state; all hear the same and conclude the same.
Invariants: nothing is changed; a reshard goes on only if all were asked the same and one update is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from tidegate.elastic.epoch.world import World
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.recovery import Chosen, Origin, Version, choose
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.sources import Sources
from tidegate.elastic.state.stamp import Note


class MembersDisagree(RuntimeError):
    """The members were not asked the same, or know of different states; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one member says when a reshard begins."""

    name: str
    source: str
    target: str
    progress: Progress
    """As far as this member knows; of one that stands by, of long ago perhaps."""
    versions: tuple[Version, ...] = ()
    notes: Mapping[int, Note] = field(default_factory=dict)
    """Of the versions, by number of updates."""


_CLAIM = TypeAdapter(Claim)


@dataclass(frozen=True, slots=True)
class Agreement:
    note: Note
    """With what the job goes on."""
    origins: Mapping[int, Origin]
    """Who gives the tensors of each rank of the source."""
    newest: Progress
    """What was committed on any rank; what it has more than the note is redone."""


def agree(name: str, sources: Sources, target: Mesh, progress: Progress, world: World) -> Agreement:
    """Called by all members of the epoch alike. Raises MembersDisagree, StateLost, PeerLost."""
    offers = list(sources.offers())
    held = sources.held
    claim = Claim(
        name,
        f"{held.mesh!r} of epoch {held.epoch}",
        repr(target),
        progress,
        tuple(version for version, _ in offers),
        # Of several with one number the first: the tensors' own note, which is of later than a copy's.
        {version.num_updates: note for version, note in reversed(offers)},
    )
    gathered = world.gather(world.membership.members, _CLAIM.dump_json(claim))
    return _conclude(held.mesh, {member: _CLAIM.validate_json(said) for member, said in gathered.items()})


def _conclude(source: Mesh, claims: Mapping[int, Claim]) -> Agreement:
    asked = {member: (said.name, said.source, said.target) for member, said in claims.items()}
    if len(set(asked.values())) > 1:
        raise MembersDisagree(f"the members were asked for different reshards: {asked}; ask all the same")
    chosen: Chosen = choose(source.ranks, {member: said.versions for member, said in claims.items()})
    notes = [said.notes[chosen.num_updates] for said in claims.values() if chosen.num_updates in said.notes]
    known = [said.progress for said in claims.values()]
    known += [note.progress for said in claims.values() for note in said.notes.values()]
    return Agreement(notes[0], chosen.origins, max(known, key=lambda progress: progress.num_updates))
