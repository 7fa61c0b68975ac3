"""The fencing term in JetStream's key-value bucket TG_TERM. Compare-and-set on the bucket's revision advances it."""

from __future__ import annotations

import base64

from tidegate.adapters.nats_link import NO_MESSAGE_FOUND, WRONG_LAST_SEQUENCE, NatsLink, NatsRefused
from tidegate.ports.bus import StaleTerm

_NS = 10**9
_TERM_STREAM = "KV_TG_TERM"
_TERM_SUBJECT = "$KV.TG_TERM.store"


class NatsTermRegister:
    def __init__(self, link: NatsLink, *, writer: str) -> None:
        self._link = link
        self._writer = writer

    async def read(self) -> tuple[int, int]:
        await self._ensure()
        try:
            found = await self._link.api(f"STREAM.MSG.GET.{_TERM_STREAM}", {"last_by_subj": _TERM_SUBJECT})
        except NatsRefused as refused:
            if refused.err_code != NO_MESSAGE_FOUND:
                raise
            return 0, 0
        return int(base64.b64decode(found["message"]["data"])), int(found["message"]["seq"])

    async def advance(self, *, expected_revision: int, term: int) -> int:
        now, revision = await self.read()
        if revision == expected_revision and term <= now:
            raise ValueError(f"the term only grows: it is {now} and cannot become {term}; take at least {now + 1}")
        try:
            ack = await self._link.publish(
                _TERM_SUBJECT,
                str(term).encode(),
                stream=_TERM_STREAM,
                # The id is this writer's alone, so that only its own retry counts as a repeat.
                message_id=f"{self._writer}/{expected_revision}/{term}",
                last_on_subject=expected_revision,
            )
        except NatsRefused as refused:
            if refused.err_code != WRONG_LAST_SEQUENCE:
                raise
            raise StaleTerm(
                f"the term was advanced since revision {expected_revision} was read (it is {revision} now); read again"
            ) from refused
        return int(ack["seq"])

    async def _ensure(self) -> None:
        """Makes the bucket as any key-value client would: one value for each key, the last."""
        await self._link.ensure_stream(
            {
                "name": _TERM_STREAM,
                "subjects": ["$KV.TG_TERM.>"],
                "retention": "limits",
                "discard": "new",
                "storage": "file",
                "num_replicas": 1,
                "max_msgs_per_subject": 1,
                "max_consumers": -1,
                "max_msgs": -1,
                "max_bytes": -1,
                "duplicate_window": 120 * _NS,
                "allow_rollup_hdrs": True,
                "allow_direct": True,
                "deny_delete": True,
            }
        )
