"""A step that all members of an epoch take together: it succeeds on all of them, or it fails on all.

Invariant: a member that fails informs the others before it raises, so that nobody waits for it.
[test_joint_step: a_failure_of_one_member_fails_all]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tidegate.elastic.epoch.world import World

_UNTIMED = nullcontext()


class MemberFailed(RuntimeError):
    """Other members failed in this step. The message has their errors."""


def run_on_all(
    world: World, step: Callable[[], bytes], *, waiting: AbstractContextManager[None] = _UNTIMED
) -> dict[int, bytes]:
    """Run `step` on all members. Returns each member's result.

    Where the step fails on some members, those raise their own errors and the others raise MemberFailed. Raises
    PeerLost. `waiting` surrounds the wait for the others.
    """
    failure, payload = None, b""
    try:
        payload = b"+" + step()
    except Exception as error:  # noqa: BLE001 - raised again, once the others know
        failure, payload = error, f"-{type(error).__name__}: {error}".encode()
    with waiting:
        payloads = world.gather(world.membership.members, payload)
    if failure is not None:
        raise failure
    failures = {member: answer[1:].decode() for member, answer in payloads.items() if answer.startswith(b"-")}
    if failures:
        raise MemberFailed(f"these members failed: {failures}")
    return {member: answer[1:] for member, answer in payloads.items()}
