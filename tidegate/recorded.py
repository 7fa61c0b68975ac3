"""The iterations of a finished run, as frozen values. The simulator's costs are fitted to them.

The sources in the run directory are:
- the rollout's last picture of an iteration: the lengths of its responses;
- the journal: the samples of each minibatch;
- the spans of the slots: the times. A slot's iterations lie between two of its loads (rollout, inference) or publishes
  (actor).

Invariants:
- A run of several incarnations, or without its end, is refused: after a restart iterations are done again.
  [test_recorded: cannot_be_calibrated_from]
- An iteration's record covers all its samples, or the run is refused. [test_recorded: cannot_be_calibrated_from]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from tidegate.codec import WireError, message_of_json
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.json_text import parse_json
from tidegate.timeline import Span, read_spans
from tidegate.types import Role
from tidegate.v1 import events_pb2

_NS_PER_S = 1e9
_ENDED = (-3, -4)
"""The places of ended sequences in `events_pb2.Generation`."""
_NEW_VERSION = {Role.ACTOR: "publishing", Role.ROLLOUT: "loading_weights", Role.INFERENCE: "loading_weights"}
_AT_WORK = {Role.ACTOR: "training", Role.ROLLOUT: "generating", Role.INFERENCE: "computing_log_probs"}


_SAME = ("cluster", "algorithm", "actor", "rollout", "inference")
"""The sections of the config that must be equal in runs to be joined."""


class NotRecorded(ValueError):
    """The folder holds no readable run. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """A minibatch. `num_tokens` counts prompts and responses."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    lengths: tuple[tuple[int, ...], ...]
    """The tokens of each response, by group."""
    seconds: float
    """From the actor's report of the iteration before to its report of this one."""
    generating_s: float
    """From the first step of any engine to the last step of any engine."""
    inferring_s: float
    """The time in which the inference's GPUs computed, summed over the GPUs."""
    minibatches: tuple[Minibatch, ...]

    @property
    def num_tokens(self) -> int:
        """The tokens of all responses."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True, slots=True)
class RecordedRun:
    config: JobConfig
    prompt_tokens: int
    """The mean tokens of a prompt."""
    kv_capacity_tokens: int
    """The KV cache tokens of one engine."""
    iterations: tuple[RecordedIteration, ...]


def recorded(folder: Path) -> RecordedRun:
    """The run in a job's folder. Raises NotRecorded."""
    try:
        return _recorded(folder)
    except OSError as error:
        raise NotRecorded(f"{folder} holds no finished run: {error}; run the job, and calibrate from it") from error
    except NotRecorded:
        raise
    except KeyError as error:
        raise NotRecorded(f"{folder}: a record lacks {error}; calibrate by the release that ran the job") from error
    except WireError as error:
        raise NotRecorded(f"{folder}/events.jsonl: {error}; calibrate by the release that ran the job") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        # A value has another type, such as a list in place of an object, or counts what is not there.
        raise NotRecorded(
            f"{folder}: a record is not of this release: {error}; calibrate by the release that ran the job"
        ) from error


def _recorded(folder: Path) -> RecordedRun:
    """The same as `recorded`. Raises OSError, and other errors for records of another release."""
    config = _config(folder / "config.json")
    (result,) = _json_lines(folder / "result.json", whole=True)
    pictures = _last_pictures(folder / "events.jsonl")
    updates = tuple(_json_lines(folder / "journal.jsonl"))
    spans = read_spans(folder / "latest" / "timeline")
    prompts = [row["num_prompt_tokens"] for row in _samples(folder / "samples")]
    _check(config, result, pictures, updates, folder)
    prompt_tokens = round(fmean(prompts)) if prompts else 0
    works = {role: [_by_iteration(spans.get(gpu, []), role) for gpu in config.placement(role)] for role in Role}
    iterations = tuple(
        RecordedIteration(
            lengths=_lengths(pictures[number]),
            seconds=result["seconds"][str(number)],
            generating_s=_stretch_s(_of(works[Role.ROLLOUT], number, folder)),
            inferring_s=_added_s(_of(works[Role.INFERENCE], number, folder)),
            minibatches=_minibatches(
                _of(works[Role.ACTOR][:1], number, folder), updates, pictures[number], number, prompt_tokens
            ),
        )
        for number in range(config.algorithm.iterations)
    )
    capacity = min(engine.kv_capacity_tokens for picture in pictures.values() for engine in picture.engines)
    return RecordedRun(config, prompt_tokens, capacity, iterations)


def joined(runs: Sequence[RecordedRun]) -> RecordedRun:
    """All runs as one run of the first's job. Raises NotRecorded where a section in `_SAME` differs."""
    first, *others = runs
    for name in _SAME:
        if any(getattr(other.config, name) != getattr(first.config, name) for other in others):
            raise NotRecorded(f"the runs differ in their section `{name}`: calibrate from runs of one config")
    prompt_tokens = round(fmean(run.prompt_tokens for run in runs))
    return replace(
        first, prompt_tokens=prompt_tokens, iterations=tuple(each for run in runs for each in run.iterations)
    )


def _config(path: Path) -> JobConfig:
    try:
        return JobConfig.read(path)
    except ConfigError as error:
        raise NotRecorded(f"{error}, or calibrate by the release that ran the job") from error


def _json_lines(path: Path, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """The object of each line, or of the `whole` file.

    Raises NotRecorded, which names the file and the invalid line."""
    data = path.read_bytes()
    for number, line in enumerate([data] if whole else data.splitlines(), start=1):
        where = path if whole else f"{path}:{number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise NotRecorded(f"{where} is no JSON: {error}; it was cut off or changed: run the job anew") from error
        if not isinstance(row, dict):
            raise NotRecorded(f"{where} is no JSON object; it was changed: run the job anew")
        yield row


def _last_pictures(path: Path) -> dict[int, events_pb2.Generation]:
    """The last picture of each iteration in which all sequences have ended."""
    pictures: dict[int, events_pb2.Generation] = {}
    for row in _json_lines(path):
        event = row["event"]
        if "generation" in event:
            picture = message_of_json(event["generation"], events_pb2.Generation())
            if picture.engines and all(place in _ENDED for place in picture.places):
                pictures[int(event.get("iteration", 0))] = picture
    return pictures


def _samples(folder: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        yield from _json_lines(path)


def _check(
    config: JobConfig,
    result: Mapping[str, Any],
    pictures: Mapping[int, events_pb2.Generation],
    updates: Sequence[Mapping[str, Any]],
    folder: Path,
) -> None:
    algorithm = config.algorithm
    if result["end"] != "finished":
        raise NotRecorded(f"{folder} is of a run that ended {result['end']}: calibrate from a finished run")
    incarnations = {update["update"].split(".")[0] for update in updates}
    if not updates:
        raise NotRecorded(f"{folder}/journal.jsonl has no optimizer step: run the job anew, with --force")
    if len(incarnations) != 1:
        raise NotRecorded(
            f"{folder} has {len(incarnations)} incarnations, as it was interrupted or trained on later, and times of "
            "the last one alone: calibrate from a job that ran through, such as the same one under another name"
        )
    trained = {int(update["update"].split(".")[1]) for update in updates}
    if without := sorted(set(range(algorithm.iterations)) - trained):
        raise NotRecorded(
            f"{folder}/journal.jsonl has no optimizer step of {len(without)} of {algorithm.iterations} iterations, "
            f"{without[0]} first: run the job anew"
        )
    size = algorithm.prompts_per_iteration * algorithm.group_size
    whole = [number for number, picture in pictures.items() if len(picture.lengths) == size]
    if len(whole) != algorithm.iterations:
        raise NotRecorded(
            f"{folder} has the lengths of {len(whole)} of {algorithm.iterations} iterations of {size} samples: "
            "calibrate from a run of this version, without algorithm.max_extra_prompts"
        )


def _by_iteration(spans: Sequence[Span], role: Role) -> list[list[Span]]:
    """A slot's work after each version that it published or loaded. Work before the first belongs to no iteration."""
    found: list[list[Span]] = []
    is_new = False
    for span in sorted(spans):
        if span.state == _NEW_VERSION[role]:
            is_new = True
        elif span.state == _AT_WORK[role]:
            if is_new:
                found.append([])
                is_new = False
            if found:
                found[-1].append(span)
    return found


def _of(slots: Sequence[Sequence[Sequence[Span]]], number: int, folder: Path) -> list[Span]:
    """All slots' work in an iteration."""
    if any(len(iterations) <= number for iterations in slots):
        raise NotRecorded(
            f"{folder}: a slot's timeline has no iteration {number}; its process was killed: run the job anew"
        )
    return [span for iterations in slots for span in iterations[number]]


def _stretch_s(spans: Sequence[Span]) -> float:
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / _NS_PER_S


def _added_s(spans: Sequence[Span]) -> float:
    return sum(span.end_ns - span.start_ns for span in spans) / _NS_PER_S


def _lengths(picture: events_pb2.Generation) -> tuple[tuple[int, ...], ...]:
    size = picture.group_size
    return tuple(tuple(picture.lengths[first : first + size]) for first in range(0, len(picture.lengths), size))


def _minibatches(
    spans: Sequence[Span],
    updates: Sequence[Mapping[str, Any]],
    picture: events_pb2.Generation,
    number: int,
    prompt_tokens: int,
) -> tuple[Minibatch, ...]:
    groups = len(picture.lengths) // picture.group_size
    own = [update["samples"] for update in updates if int(update["update"].split(".")[1]) == number]
    return tuple(
        Minibatch(
            sum(picture.lengths[_place(sample, number * groups, picture)] + prompt_tokens for sample in samples),
            _added_s(call),
        )
        for samples, call in zip(own, _calls(spans, len(own)), strict=True)
    )


def _calls(spans: Sequence[Span], num_calls: int) -> list[list[Span]]:
    """The spans of each update, without the time in which it waits for groups.

    Spans name their minibatch. Where a run's spans do not, the largest gaps between them separate the updates.
    """
    numbers = [dict(span.work).get("minibatch") for span in spans]
    if None not in numbers:
        updated = sorted({number for number in numbers if number is not None})
        found = [[span for span, of in zip(spans, numbers, strict=True) if of == number] for number in updated]
        return found + [[]] * (num_calls - len(found))
    gaps = sorted(range(1, len(spans)), key=lambda at: spans[at - 1].end_ns - spans[at].start_ns)
    bounds = [0, *sorted(gaps[: max(0, num_calls - 1)]), len(spans)]
    return [list(spans[first:end]) for first, end in pairwise(bounds)] if num_calls else []


def _place(sample: str, first_prompt: int, picture: events_pb2.Generation) -> int:
    """The index in the picture of sample INCARNATION.ITERATION.PROMPT.DRAW."""
    _, _, prompt, draw = map(int, sample.split("."))
    return (prompt - first_prompt) * picture.group_size + draw
