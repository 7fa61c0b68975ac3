"""A few reward workers that share the calls of a job.

The pool starts a worker when a call needs one. A worker that answered serves the next call. The pool kills a worker
that did not answer in time, and the next call starts another.

Invariants:
- There are at most `size` workers at a time. [test_pool: never_more_than_configured]
- A call that has ended, in any way, occupies no worker. [test_pool: another_worker_serves_the_next_call]
- No worker remains after `close`. [test_pool: nothing_remains_after_the_end]
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.rewards.worker import FunctionPath, FunctionRaised, RewardWorker, Signature, WorkerLost


class FunctionFailed(Exception):
    """A call has no value. The message says what the function did, such as `raised KeyError: 'x' at g.py:7 in score`.

    `traceback` is empty where it raised nothing.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class WorkerNotStarted(RuntimeError):
    """A worker ended, or took too long, before it had imported the functions."""


class RewardPool:
    """The pool; see the module. Use it on the thread that lives as long as the process."""

    def __init__(self, functions: Sequence[FunctionPath], *, size: int, start_timeout_s: float) -> None:
        self._functions = tuple(functions)
        self._start_timeout_s = start_timeout_s
        self._free = asyncio.Semaphore(size)
        self._idle: list[RewardWorker] = []
        self._alive: set[RewardWorker] = set()
        self._is_open = True

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the present workers."""
        return frozenset(worker.pid for worker in self._alive)

    async def signatures(self) -> tuple[Signature, ...]:
        """The functions' signatures, from a worker. Raises ValueError when one cannot be used, or WorkerNotStarted."""
        async with self._free:
            worker = await self._ready()
            self._rest(worker)
            return worker.signatures

    async def call(self, function: int, arguments: Mapping[str, Any], *, timeout_s: float) -> float:
        """The value.

        Raises FunctionFailed; ValueError or WorkerNotStarted where a new worker cannot load the functions."""
        async with self._free:
            worker = await self._ready()
            try:
                value = await worker.call(function, arguments, timeout_s=timeout_s)
            except FunctionRaised as error:
                self._rest(worker)
                raise FunctionFailed(str(error), error.traceback) from error
            except BaseException as error:
                # On a cancellation too: a late answer would be taken for that of the next call.
                self._end(worker)
                if isinstance(error, WorkerLost):
                    raise FunctionFailed(str(error)) from error
                raise
            self._rest(worker)
            return value

    def close(self) -> None:
        """End the pool.

        A running call ends with FunctionFailed, as if its worker had died. Further calls are refused."""
        self._is_open = False
        for worker in self._idle:
            self._end(worker)
        self._idle.clear()
        for worker in self._alive:
            worker.strike()

    async def _ready(self) -> RewardWorker:
        if self._idle:
            return self._idle.pop()
        if not self._is_open:
            raise WorkerNotStarted("the pool was closed")
        worker = RewardWorker()
        self._alive.add(worker)
        try:
            await worker.load(self._functions, timeout_s=self._start_timeout_s)
            return worker
        except WorkerLost as lost:
            self._end(worker)
            paths = ", ".join(each.path for each in self._functions)
            raise WorkerNotStarted(f"the process that imports {paths} {lost}") from lost
        except BaseException:
            self._end(worker)
            raise

    def _rest(self, worker: RewardWorker) -> None:
        if self._is_open:
            self._idle.append(worker)
        else:
            self._end(worker)

    def _end(self, worker: RewardWorker) -> None:
        worker.kill()
        self._alive.discard(worker)
