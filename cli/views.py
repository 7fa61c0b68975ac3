"""What `run` and `demo` show on stderr while a job runs: bars on a terminal, or else one JSON object a line.

Both get the same events. There is one bar for the present work of each component, and a lasting line for each
iteration.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TextIO, cast

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from structlog.typing import EventDict

from cli.rows import rounded
from tidegate.codec import decode_layout
from tidegate.launcher.outcome import role_name, without_phase
from tidegate.launcher.view import View
from tidegate.v1 import control_pb2, events_pb2, types_pb2

_PHASES = {
    "warm_up": "warm-up",
    "generate": "generating",
    "evaluate": "evaluating",
    "score": "scoring",
    "train": "training",
}


class OpenView(View, AbstractContextManager["OpenView"], Protocol):
    """A view that is active within its block."""


def make_view(stream: UnfailingStream) -> OpenView:
    return TerminalView(stream) if stream.isatty() else LinesView(stream)


class UnfailingStream:
    """A stream whose reader may leave (a closed terminal, a broken pipe). A failed write never ends a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class LinesView(AbstractContextManager["LinesView"]):
    """Prints one JSON object a line."""

    def __init__(self, stream: UnfailingStream) -> None:
        self._log: Any = structlog.wrap_logger(
            structlog.PrintLogger(cast(TextIO, stream)),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
                _in_order,
                structlog.processors.JSONRenderer(),
            ],
        )
        self._last_status = ("", "")

    def __exit__(self, *_: object) -> None:
        """Does nothing: the view has nothing to close."""

    def step(self, what: str) -> None:
        self._log.info("starting", what=what)

    def plan(self, message: str) -> None:
        self._log.info("plan", message=message)

    def note(self, message: str) -> None:
        self._log.warning("note", message=message)

    def event(self, event: events_pb2.Event) -> None:
        match event.WhichOneof("body"):
            case "progress":
                progress = event.progress
                self._log.info(
                    "progress",
                    role=role_name(event.role),
                    phase=progress.phase,
                    iteration=event.iteration,
                    num_done=progress.num_done,
                    num_total=progress.num_total,
                    **figures(progress.metrics),
                )
            case "iteration_reported" if event.role == types_pb2.ROLE_ACTOR:
                report = event.iteration_reported
                self._log.info(
                    "iteration",
                    iteration=event.iteration,
                    samples_trained=report.trained.num_samples,
                    **figures(report.metrics),
                )
            case "evaluation_reported":
                evaluation = event.evaluation_reported
                self._log.info("evaluation", version=evaluation.version, **figures(evaluation.metrics))
            case "layout_committed" if event.layout_committed.HasField("reshard"):
                reshard = event.layout_committed.reshard
                source = decode_layout(reshard.source)
                self._log.info(
                    resize_kind(event.layout_committed),
                    source=str(source),
                    target=str(decode_layout(reshard.target)),
                    gpus=[grant.gpu for grant in event.layout_committed.grants],
                    ranks=source.num_ranks,
                    dead_ranks=event.layout_committed.num_dead,
                    moved_bytes=reshard.moved_bytes,
                    seconds=round(sum(reshard.seconds.values()), 3),
                )
            case "failed" | "instance_lost" | "dead_lettered" | "resize_failed":
                self._log.warning("failure", source=event.source, message=failure_text(event))

    def job(self, status: control_pb2.GetJobResponse) -> None:
        present = (status.phase, status.message)
        if present != self._last_status:
            self._last_status = present
            message = without_phase(status.message, status.phase)
            self._log.info("job", phase=status.phase, message=message, iteration=status.iteration)


class TerminalView(AbstractContextManager["TerminalView"]):
    """Shows progress bars."""

    def __init__(self, stream: UnfailingStream) -> None:
        self._console = Console(file=cast(TextIO, stream), highlight=False, markup=False, soft_wrap=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._state = self._bars.add_task("starting", total=None)
        self._of_role: dict[int, TaskID] = {}
        self._last_status = ("", "")

    def __enter__(self) -> TerminalView:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def step(self, what: str) -> None:
        self._bars.update(self._state, description=f"starting {what}")

    def plan(self, message: str) -> None:
        self._console.print(message)

    def note(self, message: str) -> None:
        self._console.print(message, style="yellow")

    def event(self, event: events_pb2.Event) -> None:
        match event.WhichOneof("body"):
            case "progress":
                self._show_progress(event)
            case "iteration_reported" if event.role == types_pb2.ROLE_ACTOR:
                self._console.print(iteration_text(event))
            case "evaluation_reported":
                evaluation = event.evaluation_reported
                scores = [f"{name} {value:.3f}" for name, value in figures(evaluation.metrics).items()]
                self._console.print(f"version {evaluation.version} evaluated: {', '.join(scores)}")
            case "layout_committed" if event.layout_committed.HasField("reshard"):
                self._console.print(resize_text(event.layout_committed))
            case "failed" | "instance_lost" | "dead_lettered" | "resize_failed":
                self.note(f"{event.source}: {failure_text(event)}")

    def job(self, status: control_pb2.GetJobResponse) -> None:
        present = (status.phase, status.message)
        if present == self._last_status:
            return
        is_new = status.message != self._last_status[1]
        self._last_status = present
        self._bars.update(
            self._state, description=f"job {status.job}: {status.phase}", total=status.num_iterations or None
        )
        if status.message and is_new:
            self.note(f"job {status.job} {status.phase}: {without_phase(status.message, status.phase)}")

    def _show_progress(self, event: events_pb2.Event) -> None:
        progress = event.progress
        is_warm_up = progress.phase == "warm_up"
        where = "" if is_warm_up else f" of iteration {event.iteration}"
        text = f"{role_name(event.role)}: {_PHASES.get(progress.phase, progress.phase)}{where}"
        if event.role not in self._of_role:
            self._of_role[event.role] = self._bars.add_task(text)
        self._bars.update(
            self._of_role[event.role], description=text, completed=progress.num_done, total=progress.num_total
        )
        if not is_warm_up:
            self._bars.update(self._state, completed=event.iteration)


def _in_order(logger: Any, method: str, line: EventDict) -> EventDict:
    first = {key: line.pop(key) for key in ("time", "level", "event")}
    return {**first, **line}


def iteration_text(event: events_pb2.Event) -> str:
    """What people read of the actor's report of an iteration."""
    report, metrics = event.iteration_reported, event.iteration_reported.metrics
    num_failed = int(metrics.get("num_failed_rewards", 0))
    text = (
        f"iteration {event.iteration}: reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:.4f}, "
        f"{report.trained.num_samples} samples trained"
    )
    return text + (f", {num_failed} rewards failed and count as 0" if num_failed else "")


def figures(metrics: Any) -> dict[str, float]:
    """A component's own figures, by name."""
    return {name: rounded(float(metrics[name])) for name in sorted(metrics)}


def resize_kind(committed: events_pb2.LayoutCommitted) -> str:
    """What a reshard was for: `recovered` dead ranks, `moved` to other GPUs, or `resized` to another layout."""
    reshard = committed.reshard
    if reshard.source != reshard.target:
        return "resized"
    return "recovered" if committed.num_dead else "moved"


def resize_text(committed: events_pb2.LayoutCommitted) -> str:
    reshard = committed.reshard
    source, target = decode_layout(reshard.source), decode_layout(reshard.target)
    dead = f"{committed.num_dead} of {source.num_ranks} ranks"
    match resize_kind(committed):
        case "recovered":
            done = f"recovered: {dead} replaced, {target}"
        case "moved":
            done = f"moved: {target}"
        case _:
            done = f"resized: {source} -> {target}" + (f" without the {dead} that died" if committed.num_dead else "")
    gpus = ", ".join(grant.gpu for grant in committed.grants)
    return f"actor {done} on {gpus}, {reshard.moved_bytes} bytes moved in {sum(reshard.seconds.values()):.2f} s"


def failure_text(event: events_pb2.Event) -> str:
    match event.WhichOneof("body"):
        case "failed":
            return event.failed.message or f"a process ended with status {event.failed.exit_status}"
        case "instance_lost":
            instance = event.instance_lost.instance
            return f"{instance} left" if event.source == instance else f"{instance} was lost: its lease expired"
        case "resize_failed":
            return f"the actor stays as it is: {event.resize_failed.message}"
        case _:
            letter = event.dead_lettered
            return f"dead letter {letter.dead_letter} of {letter.subject}: {letter.reason}"
