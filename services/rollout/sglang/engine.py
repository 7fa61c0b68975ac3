"""The `Engine` protocol over a real SGLang server.

Each request is one call to the server. A thread holds the call open until the response is complete or aborted, and
`poll` collects the responses.

- Pause: the server's scheduler has the pause, and all requests sent before it, when `pause` returns. A request
  submitted during a pause stays here until the resume.
- Abort: a server aborts a running request only with its next step, whose token comes out too. An abort of all requests
  pauses it, so that all end at one step and lost tokens can be counted.
- Abort in a pause: to avoid a step, the server first retracts all requests. The remaining ones then begin with a
  prefill.
- Sleep: the server stays up without its memory, where it can release it, or on a CPU with it; elsewhere it ends
  (`features.Rest`). An awake engine has no weights until an update replaces them.

Invariants, which `tests/contract/engine_suite.py` and `tests/contract/test_sglang_engine.py` check:
- A request is in `_inside` from its submission until it comes out.
- An update happens in a pause. Afterwards, on a CPU, the server's checksums equal those of the tensors sent. On CUDA
  its checksums are of another kind.
- An engine that sleeps or woke accepts no request before an update.
- Of a running request an abort of all loses no token; of a retracted one the lost tokens are counted.
  [test_sglang_moves: lost_tokens_of_a_retracted_request_are_counted]
- After a failure every call raises EngineFailed.
"""

from __future__ import annotations

import concurrent.futures
import queue
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.rollout.engine import (
    EngineFailed,
    EngineFeatures,
    EngineLoad,
    EngineNotReady,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
    RequestId,
    RequestRefused,
    UnknownRequest,
)
from services.rollout.requests import check_request
from services.rollout.sglang.client import CallFailed
from services.rollout.sglang.estimates import SentRequest, estimated_lengths
from services.rollout.sglang.features import Rest
from services.rollout.sglang.names import held_name
from services.rollout.sglang.replies import (
    ReplyUnreadable,
    ServerLoad,
    checksums_of,
    generate_body,
    generation_of,
    is_aborted,
    load_of,
    num_lost_tokens,
)
from services.rollout.sglang.server import TOKENS_A_MESSAGE, ServerSettings, SglangServer
from services.rollout.sglang.weights import held_checksums, write_weights
from tidegate.megatron.family import model_parameters

_CONTROL_TIMEOUT_S = 60.0
"""The limit for a control call's answer. Each call waits at most for the present step."""
_LOAD_BYTES_PER_S = 100e6
"""The slowest load of weights from host memory that is waited for. A server on a CPU is some 10 times as fast."""
_ABORT_AGAIN_S = 0.2
"""The server forgets an abort that overtakes its request, so the abort is repeated until the request is out."""
_LAST_STEP_S = 2.0
"""The time for a step that ends aborted requests. Those without a reply by then are aborted one by one."""
_LOOK_AGAIN_S = 0.005
"""The pause between checks whether the server has the requests sent, which takes it a step."""
_MOST_OPEN_CALLS = 1024
"""The most threads that hold a call open. Further requests wait here for a thread."""

Reply = concurrent.futures.Future[Mapping[str, Any]]


@dataclass(slots=True)
class _Inside:
    """A request inside. `reply` is None until it is sent. SGLang matches ids by prefix, so `rid` has a fixed width."""

    request: GenerationRequest
    rid: str
    reply: Reply | None = None
    sent_s: float = 0.0


class SglangEngine:
    """Starts awake, without weights. A start takes some 20 s on a CPU. Raises EngineFailed when it fails."""

    def __init__(self, settings: ServerSettings, *, on_death: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._on_death = on_death
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._inside: dict[RequestId, _Inside] = {}
        self._done: queue.SimpleQueue[_Inside] = queue.SimpleQueue()
        self._num_submitted = 0
        self._paused: PauseMode | None = None
        self._version: int | None = None
        self._num_lost_tokens = 0
        self._is_asleep = False
        self._failed: str | None = None
        self._calls = concurrent.futures.ThreadPoolExecutor(_MOST_OPEN_CALLS, thread_name_prefix="sglang")
        self._server: SglangServer | None = SglangServer(settings, on_death=on_death)

    @property
    def features(self) -> EngineFeatures:
        features = self._awake().features
        return EngineFeatures(
            name=f"sglang {features.version}",
            repeats_draws=features.repeats_draws,
            max_lost_tokens=TOKENS_A_MESSAGE - 1,
        )

    @property
    def server_bytes(self) -> int:
        return 0 if self._server is None else self._server.private_bytes

    @property
    def server(self) -> SglangServer:
        """The server. Raises EngineNotReady while asleep."""
        return self._awake()

    def close(self) -> None:
        self._stop()
        self._inside.clear()
        self._failed = self._failed or "the engine is closed"
        self._calls.shutdown(wait=True, cancel_futures=True)

    def submit(self, request: GenerationRequest) -> None:
        self._awake()
        if self._version is None:
            raise EngineNotReady("the engine has no weights: update them first")
        check_request(request, self._settings.model)
        if request.id in self._inside:
            raise RequestRefused(
                f"request {request.id}: this id is inside the engine already; abort it or take another"
            )
        self._num_submitted += 1
        inside = _Inside(request, rid=f"{self._num_submitted:016d}")
        self._inside[request.id] = inside
        if self._paused is None:
            self._send(inside)

    def poll(self, wait_s: float = 0.0) -> tuple[Generation, ...]:
        self._awake()
        if not self._inside or (self._paused is not None and self._done.empty()):
            return ()
        finished: list[Generation] = []
        try:
            done = self._done.get(timeout=wait_s) if wait_s > 0 else self._done.get_nowait()
            while True:
                # Skip a request that an abort took out: it is done too, and its id may be inside again.
                if self._inside.get(done.request.id) is done:
                    finished.append(self._take_finished(done))
                done = self._done.get_nowait()
        except queue.Empty:
            return tuple(finished)

    def abort(self, ids: Iterable[RequestId] | None = None) -> tuple[Generation, ...]:
        self._check_alive()
        selected = set(self._inside if ids is None else ids)
        if unknown := sorted(selected - self._inside.keys()):
            raise UnknownRequest(
                f"no request {', '.join(unknown)} among the {len(self._inside)} inside the engine; it has come out "
                "already or was never submitted"
            )
        taken = [inside for id_, inside in self._inside.items() if id_ in selected]
        if open_ := [inside for inside in self._sent() if inside.request.id in selected]:
            if self._paused is None and len(selected) == len(self._inside):
                self._abort_all(open_)
            else:
                self._abort_sent(open_)
        return tuple(self._take(inside) for inside in taken)

    def load(self) -> EngineLoad:
        self._check_alive()
        if self._is_asleep:
            return EngineLoad(0, 0, 0, 0, num_lost_tokens=self._num_lost_tokens)
        reported = self._reported()
        # The server reports its load every few steps and never in a pause. After a retraction nothing runs.
        retracted = self._paused is PauseMode.RETRACT
        num_running = 0 if retracted else min(reported.num_running, len(self._sent()))
        return EngineLoad(
            num_running=num_running,
            num_waiting=len(self._inside) - num_running,
            num_used_tokens=0 if retracted else reported.num_used_tokens,
            num_capacity_tokens=reported.num_capacity_tokens,
            num_lost_tokens=self._num_lost_tokens,
        )

    def lengths(self) -> Mapping[RequestId, int]:
        load = self.load()
        now_s = time.monotonic()
        inside = [
            SentRequest(
                each.request.id,
                len(each.request.prompt_tokens),
                len(each.request.partial.tokens),
                each.request.sampling.max_new_tokens,
                now_s - each.sent_s,
            )
            for each in self._inside.values()
        ]
        return estimated_lengths(inside, num_running=load.num_running, num_used_tokens=load.num_used_tokens)

    def pause(self, mode: PauseMode) -> tuple[Generation, ...]:
        self._awake()
        aborted = self.abort() if mode is PauseMode.ABORT else ()
        if self._paused is None:
            self._until_taken_in()
        if self._paused is not PauseMode.RETRACT:
            # Skip a second pause after a retraction: the requests stay retracted until the resume.
            self._pause_server(mode)
        return aborted

    def resume(self) -> None:
        self._awake()
        if self._paused is None:
            return
        self._resume_server()
        for inside in self._inside.values():
            if inside.reply is None:
                self._send(inside)

    def sleep(self) -> None:
        self._check_alive()
        if self._inside:
            raise EngineNotReady(f"the engine cannot sleep with {len(self._inside)} requests inside: abort them first")
        if self._is_asleep:
            return
        self.resume()
        self._until_idle()
        match self._rest:
            case Rest.RELEASED:
                self._post("/release_memory_occupation")
            case Rest.ENDED:
                self._stop()
        self._version, self._is_asleep = None, True

    def wake(self) -> None:
        self._check_alive()
        if not self._is_asleep:
            return
        self._is_asleep = False
        if self._server is None:
            self._server = SglangServer(self._settings, on_death=self._on_death)
        elif self._rest is Rest.RELEASED:
            self._post("/resume_memory_occupation")

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._check_alive()
        if self._is_asleep:
            raise EngineNotReady(f"the engine sleeps and cannot take weights version {version}: wake it first")
        with self._weights_folder() as folder:
            write_weights(self._settings.model, folder, version=version, dtype=self._dtype, tensors=tensors)
            was_paused = self._paused is not None
            if not was_paused:
                self._pause_server(PauseMode.IN_PLACE)
            self._load(version, folder)
        self._version = version
        if not was_paused:
            self._resume_server()

    @property
    def version(self) -> int | None:
        return self._version

    def checksums(self) -> Mapping[str, str]:
        self._check_alive()
        return {} if self._version is None else self._server_checksums()

    def _send(self, inside: _Inside) -> None:
        body = generate_body(inside.request, rid=inside.rid)
        inside.sent_s = time.monotonic()
        inside.reply = self._calls.submit(self._awake().client.post, "/generate", body, timeout_s=None)
        inside.reply.add_done_callback(lambda _: self._done.put(inside))

    def _take_finished(self, inside: _Inside) -> Generation:
        generation = self._take(inside)
        if generation.finish_reason is FinishReason.ABORT:
            raise self._fail(f"SGLang aborted request {generation.id} by itself; see {self._awake().log_path}")
        return generation

    def _take(self, inside: _Inside) -> Generation:
        """Take a request out, finished or not."""
        request = inside.request
        del self._inside[request.id]
        if inside.reply is None:
            return Generation(request.id, request.partial, FinishReason.ABORT)
        with self._answers():
            return generation_of(request, inside.reply.result())

    def _sent(self) -> list[_Inside]:
        """The requests that were sent and have no reply yet."""
        return [inside for inside in self._inside.values() if inside.reply is not None and not inside.reply.done()]

    def _until_taken_in(self) -> None:
        """Wait until the server's scheduler has all sent requests.

        In a pause it takes none, and no abort would find them."""
        deadline_s = time.monotonic() + _CONTROL_TIMEOUT_S
        while sent := self._sent():
            reported = self._reported()
            if reported.num_running + reported.num_waiting >= len(sent):
                return
            if time.monotonic() > deadline_s:
                raise self._fail(f"SGLang did not accept {len(sent)} requests within {_CONTROL_TIMEOUT_S:g} s")
            concurrent.futures.wait([inside.reply for inside in sent if inside.reply], timeout=_LOOK_AGAIN_S)

    def _until_idle(self) -> None:
        """Wait until the server has cleared up after its last request: it asserts that nothing is left."""
        deadline_s = time.monotonic() + _CONTROL_TIMEOUT_S
        while (reported := self._reported()).num_running + reported.num_waiting + reported.num_used_tokens:
            if time.monotonic() > deadline_s:
                raise self._fail(
                    f"SGLang still holds {reported.num_used_tokens} tokens {_CONTROL_TIMEOUT_S:g} s after its requests"
                )
            time.sleep(_LOOK_AGAIN_S)

    def _abort_all(self, open_: list[_Inside]) -> None:
        """Abort all requests, which are not paused, and wait for their replies.

        1. In a pause the server drops those that wait. A retracted one loses tokens, which are counted.
        2. After the pause it makes one more token of each of the others, and returns all.
        """
        self._until_taken_in()
        self._pause_server(PauseMode.IN_PLACE)
        reported = self._reported()
        self._post("/abort_request", {"abort_all": True})
        queued = self._replied(open_, most=reported.num_waiting)
        self._num_lost_tokens += num_lost_tokens(reported, queued)
        self._resume_server()
        _, late = concurrent.futures.wait([each.reply for each in open_ if each.reply], timeout=_LAST_STEP_S)
        if late:
            self._abort_sent([each for each in open_ if each.reply in late])

    def _replied(self, open_: list[_Inside], *, most: int) -> list[tuple[GenerationRequest, Mapping[str, Any]]]:
        """The aborted requests with their replies, once there are `most`, or no further one for the time of a step.

        The server's report of those that wait may be some steps old, and some of them may run since."""
        while True:
            still_open = [each.reply for each in open_ if each.reply and not each.reply.done()]
            with self._answers():
                replies = [(each.request, each.reply.result()) for each in open_ if each.reply and each.reply.done()]
                aborted = [each for each in replies if is_aborted(each[1])]
            if len(aborted) >= most:
                return aborted
            done, _ = concurrent.futures.wait(
                still_open, timeout=_LAST_STEP_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                return aborted

    def _abort_sent(self, open_: list[_Inside]) -> None:
        """Abort requests, and wait for their replies."""
        if self._paused is PauseMode.IN_PLACE:
            self._pause_server(PauseMode.RETRACT)
        waiting = {inside.reply: inside for inside in open_ if inside.reply is not None}
        for _ in range(int(_CONTROL_TIMEOUT_S / _ABORT_AGAIN_S)):
            for inside in waiting.values():
                self._post("/abort_request", {"rid": inside.rid})
            done, _ = concurrent.futures.wait(waiting, timeout=_ABORT_AGAIN_S)
            for reply in done:
                del waiting[reply]
            if not waiting:
                break
        else:
            raise self._fail(f"SGLang did not abort {len(waiting)} requests within {_CONTROL_TIMEOUT_S:g} s")

    def _reported(self) -> ServerLoad:
        with self._answers():
            return load_of(self._get("/v1/loads?include=core"))

    @property
    def _rest(self) -> Rest:
        assert self._server is not None, "a server that rests is up"
        return self._server.features.rest(self._settings.device)

    def _pause_server(self, mode: PauseMode) -> None:
        """Pause the server. An aborting pause is one in place here, because nothing is inside any more."""
        mode = PauseMode.RETRACT if mode is PauseMode.RETRACT else PauseMode.IN_PLACE
        self._post("/pause_generation", {"mode": mode.value})
        # A pause has no answer. The scheduler handles messages in order, so an answer to this one shows that it paused.
        self._get("/server_info")
        self._paused = mode

    def _resume_server(self) -> None:
        self._post("/continue_generation", {"torch_empty_cache": False})
        self._paused = None

    @contextmanager
    def _weights_folder(self) -> Iterator[Path]:
        folder = self._settings.scratch / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _load(self, version: int, folder: Path) -> None:
        """Raises EngineFailed on any failure, because the server may then hold some of the new tensors."""
        self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(folder.absolute()),
                "load_format": "safetensors",
                "weight_version": str(version),
                "flush_cache": False,
            },
            timeout_s=_CONTROL_TIMEOUT_S + sum(path.stat().st_size for path in folder.iterdir()) / _LOAD_BYTES_PER_S,
        )
        if self._settings.device == "cpu":
            self._compare(version, folder)

    def _compare(self, version: int, folder: Path) -> None:
        held = self._server_checksums()
        if wrong := [name for name, want in held_checksums(self._settings.model, folder).items() if held[name] != want]:
            raise self._fail(
                f"weights version {version}: SGLang holds {len(wrong)} of {len(held)} tensors with other bits "
                f"than were sent, {wrong[0]} first"
            )

    def _server_checksums(self) -> dict[str, str]:
        model = self._settings.model
        parameters = model_parameters(model, padded_vocab=model.vocab_size)
        names = {parameter.name: held_name(parameter, model) for parameter in parameters}
        with self._answers():
            return checksums_of(self._post("/weights_checker", {"action": "checksum"}), names)

    def _get(self, path: str) -> Any:
        with self._answers():
            return self._awake().client.get(path, timeout_s=_CONTROL_TIMEOUT_S)

    def _post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        with self._answers():
            return self._awake().client.post(path, body, timeout_s=timeout_s)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Fail the engine where a call in this context fails, or has an unreadable answer."""
        try:
            yield
        except (CallFailed, ReplyUnreadable) as error:
            raise self._fail(str(error)) from error

    def _awake(self) -> SglangServer:
        self._check_alive()
        if self._is_asleep or self._server is None:
            raise EngineNotReady("the engine sleeps: wake it and update its weights first")
        return self._server

    def _check_alive(self) -> None:
        if self._failed is None and self._server is not None:
            self._failed = self._server.failure()
        if self._failed is not None:
            raise EngineFailed(self._failed)

    def _fail(self, reason: str) -> EngineFailed:
        """Fail the engine for good. A dead server's own reason replaces that of an interrupted call."""
        if self._server is not None:
            reason = self._server.failure_soon() or reason
        self._failed = reason
        return EngineFailed(reason)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
