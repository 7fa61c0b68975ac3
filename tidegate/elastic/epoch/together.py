"""A step that all members of an epoch take together: it succeeds on all of them, or it fails on all.

Invariant: who fails tells the others before it raises, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tidegate.elastic.epoch.world import World

_UNTIMED = nullcontext()


class MemberFailed(RuntimeError):
    """What failed other members in a step that this one did."""


def of_all(
    world: World, step: Callable[[], bytes], *, waiting: AbstractContextManager[None] = _UNTIMED
) -> dict[int, bytes]:
    """What the step gave each member; where it fails one, that one raises its error, the others MemberFailed.

    `waiting` is around the wait for the others. Raises PeerLost."""
    failure, payload = None, b""
    try:
        payload = b"+" + step()
    except Exception as error:  # noqa: BLE001 - raised again, once the others know
        failure, payload = error, f"-{type(error).__name__}: {error}".encode()
    with waiting:
        said = world.gather(world.membership.members, payload)
    if failure is not None:
        raise failure
    failures = {member: words[1:].decode() for member, words in said.items() if words.startswith(b"-")}
    if failures:
        raise MemberFailed(f"by members, what failed them: {failures}")
    return {member: words[1:] for member, words in said.items()}
