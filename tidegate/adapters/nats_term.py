"""The fencing term in JetStream's key-value bucket TG_TERM. Compare-and-set on the bucket's revision advances it."""

from __future__ import annotations

import base64

import structlog

from tidegate.adapters import subjects
from tidegate.adapters.nats_link import NO_MESSAGE_FOUND, WRONG_LAST_SEQUENCE, NatsLink, NatsRefused, num_replicas
from tidegate.adapters.subjects import TERM_STREAM, TERM_SUBJECT
from tidegate.ports.bus import BusLimits, StaleTerm

_NS = 10**9


class NatsTermRegister:
    def __init__(self, link: NatsLink, limits: BusLimits, *, writer: str) -> None:
        self._link = link
        self._limits = limits
        self._writer = writer
        self._log = structlog.get_logger("term")

    async def read(self) -> tuple[int | None, int]:
        await self._ensure()
        try:
            found = await self._link.api(f"STREAM.MSG.GET.{TERM_STREAM}", {"last_by_subj": TERM_SUBJECT})
        except NatsRefused as refused:
            if refused.err_code != NO_MESSAGE_FOUND:
                raise
            return 0, 0
        # The server leaves out the data of an empty message.
        payload = base64.b64decode(found["message"].get("data", ""))
        return subjects.term_of(payload), int(found["message"]["seq"])

    async def advance(self, *, expected_revision: int, term: int) -> int:
        now, revision = await self.read()
        if revision == expected_revision and now is not None and term <= now:
            raise ValueError(f"the term only grows: it is {now} and cannot become {term}; take at least {now + 1}")
        try:
            ack = await self._link.publish(
                TERM_SUBJECT,
                subjects.term_payload(term),
                stream=TERM_STREAM,
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
        if now is None:
            self._log.warning("the term register held no term", replaced_by=term)
        return int(ack["seq"])

    async def _ensure(self) -> None:
        """Makes the bucket as any key-value client would: one value for each key, the last."""
        await self._link.ensure_stream(
            {
                "name": TERM_STREAM,
                "subjects": ["$KV.TG_TERM.>"],
                "retention": "limits",
                "discard": "new",
                "storage": "file",
                "num_replicas": num_replicas(self._link, self._limits),
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
