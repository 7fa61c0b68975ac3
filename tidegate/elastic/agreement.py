"""The members of an epoch agree on a reshard before it begins: on the request and on the state it starts from.

Each member sends its request and the state it can provide. All members receive the same claims and reach the same
conclusion. Nothing is changed here.

Invariants:
- A reshard continues only if all members request the same one. [test_agreement: different_requests_are_refused]
- A reshard continues only if one update is whole on every rank of the source.
  [test_recovery: without_one_update_of_all_the_state_is_lost]
- A reshard carries gradients only of the portions that every rank of the source holds.
  [test_agreement: portions_that_a_rank_does_not_hold]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from tidegate.elastic.epoch.world import World
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.recovery import Origin, Recovery, Version, choose_recovery
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.sources import Sources
from tidegate.elastic.state.stamp import Note


class PortionsRefused(ValueError):
    """A reshard cannot carry these portions. Nothing was changed."""


class MembersDisagree(RuntimeError):
    """The members request different reshards, or know different states. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class PortionSizes:
    """The number of samples of each portion, in order."""

    carried: tuple[int, ...] = ()
    """Those whose gradients the reshard is to carry."""
    held: tuple[int, ...] = ()
    """Those whose gradients this member has."""


NO_PORTIONS = PortionSizes()


@dataclass(frozen=True, slots=True)
class Claim:
    """The message that one member sends when a reshard begins."""

    name: str
    source: str
    target: str
    progress: Progress
    """The progress that this member knows. On a standby member it may be old."""
    versions: tuple[Version, ...] = ()
    notes: Mapping[int, Note] = field(default_factory=dict)
    """The notes of `versions`, by number of updates."""
    portions: PortionSizes = NO_PORTIONS


_CLAIM = TypeAdapter(Claim)


@dataclass(frozen=True, slots=True)
class Agreement:
    note: Note
    """The note of the state from which the job continues."""
    origins: Mapping[int, Origin]
    """By rank of the source: the member that provides its tensors."""
    newest: Progress
    """The newest progress that any rank committed. Updates beyond `note` are trained again."""


def agree(
    name: str,
    sources: Sources,
    target: Mesh,
    progress: Progress,
    world: World,
    *,
    portions: PortionSizes = NO_PORTIONS,
) -> Agreement:
    """All members of the epoch call this with the same arguments, but for the portions that they hold.

    Raises MembersDisagree, PortionsRefused, StateLost or PeerLost.
    """
    offers = list(sources.offers())
    location = sources.location
    claim = Claim(
        name,
        f"{location.mesh!r} of epoch {location.epoch}",
        repr(target),
        progress,
        tuple(version for version, _ in offers),
        # Several versions may have one number. The first one wins: it is the tensors' own note, newer than a copy's.
        {version.num_updates: note for version, note in reversed(offers)},
        portions,
    )
    gathered = world.gather(world.membership.members, _CLAIM.dump_json(claim))
    return _conclude(location.mesh, {member: _CLAIM.validate_json(payload) for member, payload in gathered.items()})


def _conclude(source: Mesh, claims: Mapping[int, Claim]) -> Agreement:
    requests = {
        member: (claim.name, claim.source, claim.target, claim.portions.carried) for member, claim in claims.items()
    }
    if len(set(requests.values())) > 1:
        raise MembersDisagree(
            f"the members request different reshards: {requests}; call reshard with the same arguments on all"
        )
    _check_portions(source, claims)
    recovery: Recovery = choose_recovery(source.ranks, {member: claim.versions for member, claim in claims.items()})
    notes = [claim.notes[recovery.num_updates] for claim in claims.values() if recovery.num_updates in claim.notes]
    known = [claim.progress for claim in claims.values()]
    known += [note.progress for claim in claims.values() for note in claim.notes.values()]
    return Agreement(notes[0], recovery.origins, max(known, key=lambda progress: progress.num_updates))


def _check_portions(source: Mesh, claims: Mapping[int, Claim]) -> None:
    """Raises PortionsRefused unless each rank of the source holds what is to be carried. Dead ranks hold nothing."""
    (carried,) = {claim.portions.carried for claim in claims.values()}
    held = {rank: claims[rank].portions.held if rank in claims else () for rank in source.ranks}
    if carried and (wrong := {rank: sizes for rank, sizes in held.items() if sizes != carried}):
        raise PortionsRefused(
            f"the reshard is to carry {len(carried)} portions of {carried} samples, and these ranks hold gradients of "
            f"portions of {wrong}: pass the portions that are accumulated on all ranks, or none to drop them"
        )
