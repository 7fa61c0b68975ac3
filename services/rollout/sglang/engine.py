"""The `Engine` protocol over a real SGLang server.

Each request is one call to the server, held open by a thread until the response is whole or aborted; `poll` collects
what has come. A pause reaches the server's scheduler before `pause` returns, and finds there all that was sent; what is
submitted in a pause stays here until the resume. A server aborts what runs with its next step only: so that none comes
in a pause, an abort has it retract all before, and what stays inside begins with a prefill.
Invariants: a request is in `_inside` from its submission until it is handed out; an update happens in a pause, and what
the server tells of its tensors afterwards is what was sent (on a CPU; on CUDA its checksums are of another kind); after
a failure every call raises EngineFailed.
Asleep there is no server at all: that frees its memory on every device, and waking takes a start.
"""

from __future__ import annotations

import concurrent.futures
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from services.rollout.sglang.estimates import Spent, estimated_lengths
from services.rollout.sglang.names import held_name
from services.rollout.sglang.replies import ReplyUnreadable, checksums_of, generate_body, generation_of, load_of
from services.rollout.sglang.server import TOKENS_A_MESSAGE, ServerSettings, SglangServer
from services.rollout.sglang.weights import WeightSet, weight_set
from tidegate.megatron.family import model_parameters

_CONTROL_TIMEOUT_S = 60.0
"""For a control call's answer: each waits for at most the step that runs."""
_ABORT_AGAIN_S = 0.2
"""The server forgets an abort that overtakes its request: it is told again until the request is out."""
_LOOK_AGAIN_S = 0.005
"""Between looks at whether the server took in what was sent, which takes it a step."""
_MOST_OPEN_CALLS = 1024
"""Threads that hold a call open; more requests wait here for a thread."""

Reply = concurrent.futures.Future[Mapping[str, Any]]


@dataclass(slots=True)
class _Inside:
    """A request; `reply` is None until it is sent. SGLang takes a prefix for an id, so `rid` has a fixed width."""

    request: GenerationRequest
    rid: str
    reply: Reply | None = None
    sent_s: float = 0.0


class SglangEngine:
    """Starts awake, without weights; the start takes some 20 s on a CPU. EngineFailed when it fails."""

    def __init__(self, settings: ServerSettings, *, on_death: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._on_death = on_death
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._inside: dict[RequestId, _Inside] = {}
        self._done: queue.SimpleQueue[_Inside] = queue.SimpleQueue()
        self._num_submitted = 0
        self._paused: PauseMode | None = None
        self._version: int | None = None
        self._failed: str | None = None
        self._calls = concurrent.futures.ThreadPoolExecutor(_MOST_OPEN_CALLS, thread_name_prefix="sglang")
        self._server: SglangServer | None = SglangServer(settings, on_death=on_death)

    @property
    def features(self) -> EngineFeatures:
        features = self._awake().features
        return EngineFeatures(
            name=f"sglang {features.version}",
            repeats_draws=features.repeats_draws,
            num_untold_tokens=TOKENS_A_MESSAGE - 1,
        )

    @property
    def server(self) -> SglangServer:
        """EngineNotReady while asleep."""
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
                # One that an abort took is done too, and its id may be inside again.
                if self._inside.get(done.request.id) is done:
                    finished.append(self._take_finished(done))
                done = self._done.get_nowait()
        except queue.Empty:
            return tuple(finished)

    def abort(self, ids: Iterable[RequestId] | None = None) -> tuple[Generation, ...]:
        self._check_alive()
        wanted = set(self._inside if ids is None else ids)
        if unknown := sorted(wanted - self._inside.keys()):
            raise UnknownRequest(
                f"no request {', '.join(unknown)} among the {len(self._inside)} inside the engine; it has come out "
                "already or was never submitted"
            )
        taken = [inside for id_, inside in self._inside.items() if id_ in wanted]
        if open_ := [inside for inside in self._sent() if inside.request.id in wanted]:
            self._abort_sent(open_)
        return tuple(self._take(inside) for inside in taken)

    def load(self) -> EngineLoad:
        self._check_alive()
        if self._server is None:
            return EngineLoad(num_running=0, num_waiting=0, num_used_tokens=0, num_capacity_tokens=0)
        with self._answers():
            told = load_of(self._get("/v1/loads?include=core"))
        # The server tells its load every few steps and never in a pause; a retraction frees all that runs.
        retracted = self._paused is PauseMode.RETRACT
        num_running = 0 if retracted else min(told.num_running, len(self._sent()))
        return EngineLoad(
            num_running=num_running,
            num_waiting=len(self._inside) - num_running,
            num_used_tokens=0 if retracted else told.num_used_tokens,
            num_capacity_tokens=told.num_capacity_tokens,
        )

    def lengths(self) -> Mapping[RequestId, int]:
        load = self.load()
        now_s = time.monotonic()
        inside = [
            Spent(
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
            # What is retracted stays so until the resume.
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
        self._stop()
        self._version = self._paused = None

    def wake(self) -> None:
        self._check_alive()
        if self._server is None:
            self._server = SglangServer(self._settings, on_death=self._on_death)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._check_alive()
        if self._server is None:
            raise EngineNotReady(f"the engine sleeps and cannot take weights version {version}: wake it first")
        weights = weight_set(self._settings.model, version=version, dtype=self._dtype, tensors=tensors)
        was_paused = self._paused is not None
        if not was_paused:
            self._pause_server(PauseMode.IN_PLACE)
        self._load(weights)
        self._version = version
        if not was_paused:
            self._resume_server()

    @property
    def version(self) -> int | None:
        return self._version

    def checksums(self) -> Mapping[str, str]:
        self._check_alive()
        return {} if self._version is None else self._told_checksums()

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
        """Out of the engine, as it stands."""
        request = inside.request
        del self._inside[request.id]
        if inside.reply is None:
            return Generation(request.id, request.partial, FinishReason.ABORT)
        with self._answers():
            return generation_of(request, inside.reply.result())

    def _sent(self) -> list[_Inside]:
        """Whose reply is not here yet."""
        return [inside for inside in self._inside.values() if inside.reply is not None and not inside.reply.done()]

    def _until_taken_in(self) -> None:
        """Until the server's scheduler has what was sent: in a pause none comes to it, and no abort would find it."""
        deadline_s = time.monotonic() + _CONTROL_TIMEOUT_S
        while sent := self._sent():
            with self._answers():
                told = load_of(self._get("/v1/loads?include=core"))
            if told.num_running + told.num_waiting >= len(sent):
                return
            if time.monotonic() > deadline_s:
                raise self._fail(f"SGLang did not take in {len(sent)} requests within {_CONTROL_TIMEOUT_S:g} s")
            concurrent.futures.wait([inside.reply for inside in sent if inside.reply], timeout=_LOOK_AGAIN_S)

    def _abort_sent(self, open_: list[_Inside]) -> None:
        """Until their replies are there."""
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

    def _pause_server(self, mode: PauseMode) -> None:
        """With nothing inside, a pause that aborts is one in place."""
        mode = PauseMode.RETRACT if mode is PauseMode.RETRACT else PauseMode.IN_PLACE
        self._post("/pause_generation", {"mode": mode.value})
        # The scheduler takes its messages in order, and the pause itself is not answered: this one is.
        self._get("/server_info")
        self._paused = mode

    def _resume_server(self) -> None:
        self._post("/continue_generation", {"torch_empty_cache": False})
        self._paused = None

    def _load(self, weights: WeightSet) -> None:
        """EngineFailed when anything fails: the server may hold some of the new tensors then."""
        self._post("/begin_weight_update")
        for bucket in weights.buckets():
            self._post(
                "/update_weights_from_tensor",
                {"serialized_named_tensors": [bucket], "weight_version": str(weights.version), "flush_cache": False},
            )
        self._post("/end_weight_update")
        if self._settings.device == "cpu":
            self._compare(weights)

    def _compare(self, weights: WeightSet) -> None:
        told = self._told_checksums()
        if wrong := [name for name, want in weights.checksums().items() if told[name] != want]:
            raise self._fail(
                f"weights version {weights.version}: SGLang holds {len(wrong)} of {len(told)} tensors with other bits "
                f"than were sent, {wrong[0]} first"
            )

    def _told_checksums(self) -> dict[str, str]:
        model = self._settings.model
        parameters = model_parameters(model, padded_vocab=model.vocab_size)
        names = {parameter.name: held_name(parameter, model) for parameter in parameters}
        with self._answers():
            return checksums_of(self._post("/weights_checker", {"action": "checksum"}), names)

    def _get(self, path: str) -> Any:
        with self._answers():
            return self._awake().client.get(path, timeout_s=_CONTROL_TIMEOUT_S)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._answers():
            return self._awake().client.post(path, body, timeout_s=_CONTROL_TIMEOUT_S)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """A call that breaks off, or whose answer cannot be read, fails the engine."""
        try:
            yield
        except (CallFailed, ReplyUnreadable) as error:
            raise self._fail(str(error)) from error

    def _awake(self) -> SglangServer:
        self._check_alive()
        if self._server is None:
            raise EngineNotReady("the engine sleeps: wake it and update its weights first")
        return self._server

    def _check_alive(self) -> None:
        if self._failed is None and self._server is not None:
            self._failed = self._server.failure()
        if self._failed is not None:
            raise EngineFailed(self._failed)

    def _fail(self, why: str) -> EngineFailed:
        """From now on every call says so. A server that died says more than a call that broke off."""
        if self._server is not None:
            why = self._server.failure_soon() or why
        self._failed = why
        return EngineFailed(why)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
