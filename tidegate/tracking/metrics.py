"""Makes rows of metrics from a job's events, for TensorBoard and W&B.

The actor's report gives a row with its metrics, samples, rates, and resizes since the last report. The end of each
other stretch of an iteration gives a row too. The stretches follow one another:
1. `load` ends when rollout and inference hold the weights.
2. `generate` ends with the rollout's report.
3. `train` ends with the actor's report.
4. `save` ends with the checkpoint.
5. `publish` ends with the new version.

An evaluation of version v is a row of iteration v, which samples from that version. The same events give the same rows.

Invariants:
- An incarnation reports an iteration once. [test_metrics: comes_twice_gives_one_row]
- An event of an older incarnation gives no row. [test_metrics: older_incarnation_gives_no_row]
- A restart keeps the evaluation of the weights with which it begins.
  [test_metrics: evaluation_of_the_weights_it_begins_with]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tidegate.v1 import events_pb2, types_pb2

_NS_PER_S = 1e9
_STRETCHES = ("load", "generate", "train", "save", "publish")
_LOADERS = frozenset({types_pb2.ROLE_ROLLOUT, types_pb2.ROLE_INFERENCE})
_ROLES: dict[int, str] = {
    types_pb2.ROLE_ACTOR: "actor",
    types_pb2.ROLE_ROLLOUT: "rollout",
    types_pb2.ROLE_INFERENCE: "inference",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Metrics of iteration `step` in `incarnation`, by names of the form `<group>/<metric>`."""

    step: int
    incarnation: int
    unix_s: float
    values: Mapping[str, float]


@dataclass(slots=True)
class _Resizes:
    """The actor's resizes since its last report."""

    count: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0


@dataclass(slots=True)
class _Incarnation:
    """The state of one incarnation."""

    number: int
    stretch: str = ""
    """The last stretch that ended. Empty before the first."""
    ended_ns: int = 0
    began_ns: int | None = None
    """The begin of the present iteration: the report of the one before, or the load of its weights."""
    last_reported: int = -1
    loaded: set[int] = field(default_factory=set)
    """The roles that hold the last published version."""
    num_gpus: dict[str, int] = field(default_factory=dict)
    resizes: _Resizes = field(default_factory=_Resizes)
    has_row: bool = False


class IterationMetrics:
    """The metrics of one job, from its events in the stream's order.

    `evaluations` are those of the start it resumes."""

    def __init__(self, evaluations: Mapping[int, Mapping[str, float]] | None = None) -> None:
        self._now = _Incarnation(0)
        self.evaluations = dict(evaluations or {})
        """The evaluation metrics of each version that counts."""

    def take(self, event: events_pb2.Event) -> Row | None:
        """The event's row. Most events give none."""
        if event.incarnation < self._now.number:
            return None
        if event.incarnation > self._now.number:
            self._now = _Incarnation(event.incarnation)
        values = dict(self._values(event))
        if not values:
            return None
        is_evaluation = event.HasField("evaluation_reported")
        step = event.evaluation_reported.version if is_evaluation else event.iteration
        if not self._now.has_row:
            self._now.has_row = True
            values = {**self._kept(step), **values}
        return Row(step, event.incarnation, event.occurred_unix_ns / _NS_PER_S, values)

    def _values(self, event: events_pb2.Event) -> Iterator[tuple[str, float]]:
        now, at_ns = self._now, event.occurred_unix_ns
        match event.WhichOneof("body"):
            case "layout_committed":
                self._note_layout(event)
            case "weights_loaded":
                now.loaded.add(event.role)
                if now.loaded >= _LOADERS:
                    now.began_ns = at_ns if now.began_ns is None else now.began_ns
                    yield from self._ended("load", at_ns)
            case "iteration_reported" if event.role == types_pb2.ROLE_ACTOR:
                if event.iteration > now.last_reported:
                    now.last_reported = event.iteration
                    yield from self._ended("train", at_ns)
                    yield from self._reported(event.iteration_reported, at_ns)
            case "iteration_reported":
                if event.role == types_pb2.ROLE_ROLLOUT:
                    yield from self._ended("generate", at_ns)
                for name, value in event.iteration_reported.metrics.items():
                    yield f"{_ROLES.get(event.role, 'other')}/{name}", value
            case "checkpoint_saved":
                yield from self._ended("save", at_ns)
            case "weights_published":
                now.loaded.clear()
                yield from self._ended("publish", at_ns)
            case "evaluation_reported":
                yield from self._evaluated(event.evaluation_reported)

    def _evaluated(self, evaluation: events_pb2.EvaluationReported) -> Iterator[tuple[str, float]]:
        """The evaluation's metrics. None for a repeat: a new lead's evaluation has the same figures."""
        figures = {f"evaluation/{name}": value for name, value in evaluation.metrics.items()}
        if self.evaluations.get(evaluation.version) != figures:
            self.evaluations[evaluation.version] = figures
            yield from figures.items()

    def _kept(self, step: int) -> Mapping[str, float]:
        """The evaluation of the weights with which an incarnation begins, to be repeated in its first row.

        That row supersedes all rows of its step and later ones. The job does not evaluate those weights again. It
        evaluates later versions anew, so their old figures are dropped."""
        self.evaluations = {version: figures for version, figures in self.evaluations.items() if version <= step}
        return self.evaluations.get(step, {})

    def _note_layout(self, event: events_pb2.Event) -> None:
        committed = event.layout_committed
        self._now.num_gpus[_ROLES.get(event.role, "other")] = len(committed.grants)
        if committed.HasField("reshard"):
            resizes = self._now.resizes
            resizes.count += 1
            resizes.seconds += sum(committed.reshard.seconds.values())
            resizes.moved_bytes += committed.reshard.moved_bytes

    def _ended(self, stretch: str, at_ns: int) -> Iterator[tuple[str, float]]:
        """The seconds of a stretch.

        None before the incarnation's first iteration, and none for a stretch out of order."""
        now = self._now
        if now.stretch not in ("", "publish") and _STRETCHES.index(stretch) <= _STRETCHES.index(now.stretch):
            return
        if now.stretch and (stretch in ("generate", "train") or now.last_reported >= 0):
            yield f"seconds/{stretch}", max(0, at_ns - now.ended_ns) / _NS_PER_S
        now.stretch, now.ended_ns = stretch, at_ns

    def _reported(self, report: events_pb2.IterationReported, at_ns: int) -> Iterator[tuple[str, float]]:
        now = self._now
        for name, value in report.metrics.items():
            yield f"iteration/{name}", value
        trained = report.trained.num_samples
        filtered = sum(fate.num_samples for fate in report.filtered)
        discarded = sum(fate.num_samples for fate in report.discarded)
        yield from (("samples/trained", trained), ("samples/filtered", filtered), ("samples/discarded", discarded))
        yield "samples/duplicates_dropped", report.num_duplicates_dropped
        seconds = (at_ns - now.began_ns) / _NS_PER_S if now.began_ns is not None else 0.0
        if seconds > 0:
            num_samples = trained + filtered + discarded
            yield "seconds/iteration", seconds
            yield "throughput/samples_per_s", num_samples / seconds
            if "response_tokens_mean" in report.metrics:
                tokens = num_samples * report.metrics["response_tokens_mean"]
                yield "throughput/response_tokens_per_s", tokens / seconds
        now.began_ns = at_ns
        for role, count in sorted(now.num_gpus.items()):
            yield f"gpus/{role}", count
        yield from (("resizes/count", now.resizes.count), ("resizes/seconds", now.resizes.seconds))
        yield "resizes/moved_bytes", now.resizes.moved_bytes
        now.resizes = _Resizes()
