"""One connection to NATS, and the JetStream calls over it. Each call is retried until its deadline.

A call ends in one of these ways:
- an answer;
- `NatsRefused` with JetStream's own code: nothing changed;
- `JobNotOpen`: the stream of the call does not exist;
- `BusUnavailable` after the deadline: the outcome is unknown.

Time-outs, missing responders (a stream between two leaders), JetStream's 503 and `_STILL_AT_WORK` are retried.

Invariants:
- The connection is kept up for good: only `close` closes it. [test_bus_server: go_on_after_the_server_was_killed]
- The log has a lost connection, and no closed one. [test_nats_link: only_a_lost_connection_is_in_the_log]
- No call ends as refused while its server still works on the message. [test_nats_cluster: still_works_on_is_waited_for]
- A server that settles no call is left for another one. [test_partitioned_stores: a_leader_of_streams_that_is_cut_off]
- A read leaves no message out, wherever the connection moves meanwhile. [test_nats_cluster: moves_leaves_nothing_out]
- No error text carries a URL's credentials. [test_bus_server: named_without_its_password]

Every pull has its own inbox, so that a late answer to an abandoned call reaches nobody and is delivered again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import shuffle
from typing import Any, TypeVar

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout

from tidegate.adapters.permissions import inbox_prefix
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Credential
from tidegate.logs import without_credentials
from tidegate.ports.bus import BusLimits, BusUnavailable, JobNotOpen, MessageTooLarge, StreamStuck

T = TypeVar("T")

# JetStream's error codes (server/errors.json of nats-server).
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
NO_MESSAGE_FOUND = 10037
WRONG_LAST_SEQUENCE = 10071
MAX_BYTES_EXCEEDED = 10077
# The server sends these as 503, yet a repeat does not help.
_DEFINITE_503 = frozenset({MAX_BYTES_EXCEEDED})
_ID_IN_PROCESS = 10158
_SUBJECT_IN_PROCESS = 10164
_TOO_MANY_REQUESTS = 10167
# No 503, yet nothing is settled. The message that the leader works on is often the first attempt of the same call.
_STILL_AT_WORK = frozenset({_ID_IN_PROCESS, _SUBJECT_IN_PROCESS, _TOO_MANY_REQUESTS})

# One attempt of a call. A server answers within milliseconds; after this time the answer is lost and asked for again.
_ATTEMPT_S = 2.0
# A read from several servers is asked for again sooner, and then each time after twice as long. Any copy of a stream
# may answer it: for a minute and more a server gives one read in three to a server that it no longer reaches.
_FIRST_READ_S = 0.25
# After a deadline the answer to a message is waited for once more, and for longer: a disk may be slow.
_LAST_ATTEMPT_S = 5.0
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
# A call without an answer for so long goes to another server: this one may be cut off from the others. Leaders are
# elected anew within ten seconds, so within the deadline two others are tried, and this one is not tried again.
_MOVE_AFTER_S = 5.0
# A waiting pull is sent again this often: a server that restarted has forgotten it and would leave us waiting.
_LINGER_S = 2.0
# A pull waits at least this long: one that expires on its way finds nothing, even where messages are.
_LEAST_WAIT_S = 0.05
# A batch ends here: beyond 128 MB of waiting messages, nats-py would drop some, and they would come again much later.
_BATCH_BYTES = 64 * 2**20
# The messages of one direct read: a few hundred kilobytes of events.
_READ_BATCH = 256
# How the server ends a direct read of a stream that has nothing from there on.
_NOTHING_THERE = "404"
# A dead letter adds this much to a message (subject, reason). It is kept free below the server's limit.
DEAD_LETTER_HEADROOM_BYTES = 4096
# A majority of three outlives the death of one.
_COPIES = 3


class NatsRefused(RuntimeError):
    """JetStream's definite refusal of a call."""

    def __init__(self, description: str, *, err_code: int) -> None:
        super().__init__(f"{description} (JetStream error {err_code})")
        self.err_code = err_code


class _NoAnswerYet(Exception):
    """This attempt got no answer that settles the call."""


class _Silence(_NoAnswerYet):
    """This attempt got no answer at all."""


class _Proof:
    """Shows a server who connects. The next connection shows a credential that was renewed meanwhile."""

    def __init__(self, credential: Path) -> None:
        identity = Credential.load(credential).identity
        self._chain = credential / CREDENTIAL
        self._context = ssl.create_default_context(cafile=credential / CA_CERT)
        self._context.load_cert_chain(self._chain)
        self.options: dict[str, Any] = {"tls": self._context, "inbox_prefix": inbox_prefix(identity)}

    def renew(self) -> None:
        with suppress(OSError):  # the old one stays: ssl.SSLError is an OSError
            self._context.load_cert_chain(self._chain)


class NatsLink:
    """`connect` makes it. A process needs one."""

    def __init__(self, connection: Client, *, deadline_s: float, num_servers: int = 1) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._num_servers = num_servers
        self._replicated: dict[str, bool] = {}
        """By stream: whether a copy may answer that is behind."""
        self._moved_s = 0.0
        self._silent_since_s: dict[str, float] = {}
        """By subject of a pull: when the server first said nothing to it."""
        self._log = structlog.get_logger("tidegate.nats")

    @classmethod
    async def connect(cls, url: str, *, name: str, deadline_s: float, credential: Path | None = None) -> NatsLink:
        """`credential`: the folder of who connects. BusUnavailable when the server does not answer within the deadline.
        CertsError."""
        proof = None if credential is None else _Proof(credential)
        log = structlog.get_logger("tidegate.nats").bind(server=without_credentials(url))
        reasons: list[str] = []

        async def on_error(error: Exception) -> None:
            reasons[:] = [f"{type(error).__name__}: {error}"]
            log.warning("nats_error", error=reasons[0])

        async def on_disconnected() -> None:
            # The library calls this at our own `close` too.
            if not connection.is_closed:
                log.warning("nats_disconnected")
                if proof is not None:
                    proof.renew()

        async def on_reconnected() -> None:
            log.info("nats_reconnected")

        connection = Client()
        servers = url.split(",")
        # In this order, each time from the next one on: the library would shuffle, and may take the same one again.
        shuffle(servers)
        connecting = connection.connect(
            servers,
            name=name,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            dont_randomize=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # it is slept, so a fraction works
            **({} if proof is None else proof.options),
        )
        try:
            await asyncio.wait_for(connecting, deadline_s)
        except (TimeoutError, NatsError, OSError) as failure:
            reason = reasons[0] if reasons else f"{type(failure).__name__}: {failure}"
            raise BusUnavailable(
                f"NATS at {without_credentials(url)} did not answer within {deadline_s:g} s ({reason}); "
                "check the URL and that the server runs with JetStream on (-js)"
            ) from failure
        return cls(connection, deadline_s=deadline_s, num_servers=len(servers))

    @property
    def num_servers(self) -> int:
        """Those that were named, or that the server names. One that is away may be in neither."""
        # The library keeps no count: what it discovered leaves out what was named.
        named: list[str] = self._connection._server_info.get("connect_urls") or []
        return max(self._num_servers, len(named))

    async def close(self) -> None:
        """Works while the server is away too. Unsent messages are given up; their callers have got BusUnavailable."""
        with suppress(ConnectionError):
            await self._connection.close()

    async def api(self, call: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls JetStream's management API, `$JS.API.<call>`."""
        return await self._answer(f"$JS.API.{call}", json.dumps(request).encode())

    async def ensure_stream(self, config: Mapping[str, Any]) -> None:
        """Creates the stream. An existing stream takes the config's limits, and keeps its first sequence.

        It looks before it creates: NATS asks first whether the disk has room for a second stream of that size.
        """
        name = config["name"]
        try:
            first = (await self.require_stream(name))["config"].get("first_seq")
        except JobNotOpen:
            await self.api(f"STREAM.CREATE.{name}", config)
            return
        kept = {key: value for key, value in config.items() if key != "first_seq"}
        await self.api(f"STREAM.UPDATE.{name}", kept if first is None else {**kept, "first_seq": first})

    async def require_stream(self, stream: str) -> dict[str, Any]:
        """The stream's info. JobNotOpen when there is none."""
        try:
            return await self.api(f"STREAM.INFO.{stream}", {})
        except NatsRefused as refused:
            raise _not_open(stream, refused) from refused

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        stream: str,
        message_id: str | None = None,
        last_on_subject: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the stream's acknowledgement (`seq`, `duplicate`).

        One of two arguments makes a retry harmless:
        - `message_id`: an id that the stream remembers for its window;
        - `last_on_subject`: the sequence of the last message on the subject (0: none). NatsRefused with
          WRONG_LAST_SEQUENCE when it differs.

        StreamStuck where the server cannot write to its disk.
        """
        all_headers = {"Nats-Expected-Stream": stream, **(headers or {})}
        if message_id is not None:
            all_headers["Nats-Msg-Id"] = message_id
        if last_on_subject is not None:
            all_headers["Nats-Expected-Last-Subject-Sequence"] = str(last_on_subject)
        ask = partial(self._ask, subject, payload, stream=stream, headers=all_headers)
        try:
            return await self._until_deadline(subject, ask)
        except BusUnavailable:
            if not await self._tells_of(stream):
                raise
            return await self._after_silence(stream, ask)

    async def _after_silence(self, stream: str, ask: Callable[[float], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """One more try with a server that answers again. StreamStuck where it answers, and not about the message.

        NATS (2.15) does not answer a message that it could not write, nor any later one of the stream.
        """
        try:
            return await ask(_LAST_ATTEMPT_S)
        except _Silence as silence:
            if await self._tells_of(stream):
                raise StreamStuck(
                    f"NATS answers, but takes no message for stream {stream}: it could not write to its disk, and "
                    "takes none before it is restarted; make room in its store_dir, restart it and resume"
                ) from silence
            unsettled: _NoAnswerYet = silence
        except _NoAnswerYet as other:
            unsettled = other
        raise BusUnavailable(f"NATS does not settle a message ({unsettled}); check that its servers run") from unsettled

    async def _tells_of(self, stream: str) -> bool:
        """Whether the server says now that it has the stream."""
        try:
            await self._ask(f"$JS.API.STREAM.INFO.{stream}", b"{}", _ATTEMPT_S)
        except (_NoAnswerYet, NatsRefused):
            return False
        return True

    def check_size(self, payload: bytes, *, what: str, remedy: str) -> None:
        """MessageTooLarge unless the server accepts the message and its dead letter too."""
        limit = self._connection.max_payload - DEAD_LETTER_HEADROOM_BYTES
        if len(payload) > limit:
            raise MessageTooLarge(
                f"{what} is {len(payload)} bytes; this NATS server takes {limit} "
                f"(max_payload {self._connection.max_payload} less {DEAD_LETTER_HEADROOM_BYTES} for headers): "
                f"raise max_payload in the server's config, or {remedy}"
            )

    async def settle(self, message: Msg, verdict: bytes) -> None:
        """Answers a delivery (+ACK, -NAK, +WPI, +TERM) and waits until the server has the answer."""

        async def attempt(timeout_s: float) -> None:
            await self._request(message.reply, verdict, timeout_s=timeout_s)

        await self._until_deadline(f"{verdict[:4].decode()} of {message.subject}", attempt)

    async def pull(self, stream: str, consumer: str, *, num: int, timeout_s: float) -> list[Msg]:
        """Waits for the first message, then takes up to `num` that are there. NatsRefused when no consumer answers.

        Without a time to wait it takes what is there, and the server answers at once where nothing is."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        if timeout_s <= 0:
            there = {"batch": num, "no_wait": True, "max_bytes": _BATCH_BYTES}
            return await self._pull_once(subject, there, num=num)
        while True:
            wait_s = min(max(ends - loop.time(), _LEAST_WAIT_S), _LINGER_S)
            linger = {"batch": 1, "expires": int(wait_s * 1e9)}
            messages = await self._pull_once(subject, linger, num=1, silence_s=wait_s + _ATTEMPT_S)
            # Take only what is there now: without `no_wait` the server would wait for a whole batch.
            if messages and num > 1:
                rest = {"batch": num - 1, "no_wait": True, "max_bytes": _BATCH_BYTES}
                messages += await self._pull_once(subject, rest, num=num - 1)
            if messages or loop.time() >= ends:
                return messages

    async def _pull_once(
        self, subject: str, request: Mapping[str, Any], *, num: int, silence_s: float = _ATTEMPT_S
    ) -> list[Msg]:
        began_s = asyncio.get_running_loop().time()
        messages, status = await self._collect(subject, request, num=num, silence_s=silence_s)
        if messages or status is not None:
            self._silent_since_s.pop(subject, None)
        else:
            await self._leave_silent_server(self._silent_since_s.setdefault(subject, began_s))
        return messages

    async def read(self, stream: str, *, from_sequence: int, num: int = _READ_BATCH) -> list[Msg]:
        """The next stored messages, of which none is left out, without a consumer. An answer may have fewer than `num`
        where there are more, and none only at the end. `stored_sequence` has the place of each.

        JobNotOpen without the stream. A stream that a restarted server has not opened again yet is waited for.
        """
        subject = f"$JS.API.DIRECT.GET.{stream}"
        # Some older servers find nothing where no subject is named and the first sequence itself is gone.
        request = {"seq": from_sequence, "next_by_subj": ">", "batch": num}
        patience_s = _FIRST_READ_S if self.num_servers > 1 else _ATTEMPT_S

        async def attempt(timeout_s: float) -> list[Msg]:
            nonlocal patience_s
            within_s, patience_s = min(patience_s, timeout_s), 2 * patience_s
            try:
                came, status = await self._collect(subject, request, num=num, silence_s=within_s)
            except NatsRefused as nobody:
                await self.require_stream(stream)
                raise _NoAnswerYet("the stream does not respond") from nobody
            if found := _up_to_one_lost(came):
                return found
            if status != _NOTHING_THERE:
                raise _NoAnswerYet("the answer is lost, or a part of it")
            if await self._has_more(stream, from_sequence):
                raise _NoAnswerYet("a copy of the stream that is behind has answered")
            return []

        return await self._until_deadline(subject, attempt)

    async def _has_more(self, stream: str, from_sequence: int) -> bool:
        """Whether the stream's leader has what a copy of it did not have."""
        if stream not in self._replicated:
            self._replicated[stream] = int((await self.require_stream(stream))["config"]["num_replicas"]) > 1
        return self._replicated[stream] and await self.next_on(stream, ">", from_sequence=from_sequence) is not None

    async def last_on(self, stream: str, subject: str) -> bytes | None:
        """The payload of the last message on a subject. None where there is none. JobNotOpen."""
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        except NatsRefused as refused:
            if refused.err_code == NO_MESSAGE_FOUND:
                return None
            raise _not_open(stream, refused) from refused
        return base64.b64decode(answer["message"].get("data", ""))

    async def next_on(self, stream: str, subject: str, *, from_sequence: int) -> tuple[int, bytes] | None:
        """The first message on a subject from a sequence on, with its own. None where there is none. JobNotOpen."""
        try:
            wanted = {"seq": from_sequence, "next_by_subj": subject}
            message = (await self.api(f"STREAM.MSG.GET.{stream}", wanted))["message"]
        except NatsRefused as refused:
            if refused.err_code == NO_MESSAGE_FOUND:
                return None
            raise _not_open(stream, refused) from refused
        return int(message["seq"]), base64.b64decode(message.get("data", ""))

    async def remove(self, stream: str, sequence: int) -> None:
        """Delete a message. Where another call deleted it first, the effect is the same."""
        with suppress(NatsRefused):
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})

    async def tell(self, subject: str, payload: bytes) -> None:
        """Sends a message, at most once, and waits for no answer. One that cannot be sent now is given up."""
        # Without a connection it would take the room of publishes that must get through.
        if self._connection.is_connected:
            with suppress(NatsError):
                await self._connection.publish(subject, payload)

    async def subscribe(
        self, subject: str, on_message: Callable[[Msg], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """A plain subscription, at most once: a hint, never the authority. The returned function ends it.

        `on_message` takes each message that arrives, and drops what is too much for it.
        """
        # With its limits the library would drop messages itself, each with an error in the log.
        subscription = await self._connection.subscribe(
            subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )

        async def end() -> None:
            with suppress(ConnectionClosedError):  # the connection closed first and ended the subscription
                await subscription.unsubscribe()

        return end

    async def _collect(
        self, subject: str, request: Mapping[str, Any], *, num: int, silence_s: float
    ) -> tuple[list[Msg], str | None]:
        """The messages that answer one request, until the server's closing status or its silence; and that status.

        `silence_s`: how long the next message is waited for.
        """
        inbox = self._connection.new_inbox()
        messages: list[Msg] = []
        status: str | None = None
        try:
            subscription = await self._connection.subscribe(inbox)
            try:
                await self._connection.publish(subject, json.dumps(request).encode(), reply=inbox)
                while len(messages) < num:
                    message = await subscription.next_msg(timeout=silence_s)
                    headers = message.headers or {}
                    status = headers.get("Status")
                    if status == "503":
                        raise NatsRefused(f"nobody answers {subject}", err_code=CONSUMER_NOT_FOUND)
                    if status is None:
                        messages.append(message)
                        continue
                    # A consumer with copies closes a request before it sends what it has for it: it waits for the
                    # copies. What it does not send it tells.
                    unsent = headers.get("Nats-Pending-Messages")
                    num = len(messages) if unsent is None else num - int(unsent)
            finally:
                await subscription.unsubscribe()
        except NatsTimeout:
            pass  # the server went away in between: return what came, the rest is delivered again
        except NatsError as failure:
            raise BusUnavailable(f"NATS cannot be asked {subject}: {failure}") from failure
        return messages, status

    async def _answer(self, subject: str, payload: bytes) -> dict[str, Any]:
        return await self._until_deadline(subject, partial(self._ask, subject, payload))

    async def _ask(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        *,
        stream: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One attempt of a call. NatsRefused, _NoAnswerYet."""
        reply = await self._request(subject, payload, timeout_s=timeout_s, headers=headers, stream=stream)
        answer: dict[str, Any] = json.loads(reply.data)
        error = answer.get("error")
        if error is None:
            return answer
        err_code = error.get("err_code", error["code"])
        if err_code in _STILL_AT_WORK or (error["code"] == 503 and err_code not in _DEFINITE_503):
            raise _NoAnswerYet(error["description"])
        raise NatsRefused(error["description"], err_code=err_code)

    async def _request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        stream: str | None = None,
    ) -> Msg:
        try:
            return await self._connection.request(
                subject, payload, timeout=timeout_s, headers=dict(headers) if headers else None
            )
        except NoRespondersError as failure:
            if stream is not None:
                await self.require_stream(stream)
            raise _NoAnswerYet("no stream responds") from failure
        except NatsTimeout as failure:
            raise _Silence(f"{type(failure).__name__}: {failure}") from failure
        except NatsError as failure:
            raise _NoAnswerYet(f"{type(failure).__name__}: {failure}") from failure

    async def _until_deadline(self, what: str, attempt: Callable[[float], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ends = began_s + self._deadline_s
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                return await attempt(min(_ATTEMPT_S, max(ends - loop.time(), _FIRST_RETRY_S)))
            except _NoAnswerYet as unsettled:
                if self._connection.is_closed or loop.time() + retry_s >= ends:
                    raise BusUnavailable(
                        f"NATS did not answer {what} within {self._deadline_s:g} s ({unsettled}); "
                        "check that the server runs and is reachable"
                    ) from unsettled
            await self._leave_silent_server(began_s)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def _leave_silent_server(self, since_s: float) -> None:
        """Connects to another server, where there is one and this one has settled a call since then no more."""
        now_s = asyncio.get_running_loop().time()
        if self.num_servers > 1 and now_s - max(since_s, self._moved_s) >= _MOVE_AFTER_S:
            self._moved_s = now_s
            self._log.warning("nats_left", reason=f"a call has no answer for {now_s - since_s:.1f} s")
            await self._connection.force_reconnect()


def stored_sequence(message: Msg) -> int:
    """The place in its stream of a message that was read."""
    return int((message.headers or {})["Nats-Sequence"])


def _up_to_one_lost(messages: list[Msg]) -> list[Msg]:
    """An answer's messages before the first that was lost: each names the one that was sent before it, or 0.

    Where a connection moves to another server, what is under way to the first one is lost, and the rest may arrive.
    """
    sent = 0
    for at, message in enumerate(messages):
        if int((message.headers or {})["Nats-Last-Sequence"]) != sent:
            return messages[:at]
        sent = stored_sequence(message)
    return messages


def _not_open(stream: str, refused: NatsRefused) -> Exception:
    if refused.err_code != STREAM_NOT_FOUND:
        return refused
    return JobNotOpen(f"there is no stream {stream}: the job was not opened on this bus; call open_job first")


def num_replicas(link: NatsLink, limits: BusLimits) -> int:
    """The copies that a stream of ours has."""
    if limits.num_replicas is not None:
        return limits.num_replicas
    return _COPIES if link.num_servers >= _COPIES else 1
