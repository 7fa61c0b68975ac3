"""What must hold of a job, whatever was done to it. Pure functions from what was collected to the faults found.

- samples: the lineage that leads to the final weights has each sample once, and no other.
- weights: they are those of the undisturbed run.
- owners: no two components spend the same time on a GPU, and none works on one whose gate another's token has passed.
- tokens: the tokens of a GPU only grow, and none is granted twice.
- progress: nothing stands still for long where no fault holds it.
- resumes: only a fault that may end a run ends it, and the next start goes on at the first try.
- summary: the figures at the end are those of the lineage.
- answers: each command of a person ends with an answer.
- leftovers: no process and no file stays that should go.

The code is its own: it counts what the job did by its journal, events and gates, and shares nothing with the ledgers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from tests.chaos.collected import Attempt, Collected, Sighting, Span, Strike
from tests.chaos.record import Row

MOST_STILL_S = 60.0
"""A command that got lost is sent again after its deadline of 25 s, at most twice before its change is given up."""
_LEAST_OVERLAP_NS = 5_000_000
"""Two components on one machine read one clock. Each writes a span's end after the work has ended."""
_LAST_WORDS = 2000
"""The end of what a run prints: its message, which says how to go on."""
_FINISHED = "finished"
_Grant = tuple[str, tuple[int, int]]
"""A GPU and a token: term and counter."""


def verdicts(found: Collected) -> dict[str, list[str]]:
    """What each oracle has to say. Empty lists are good."""
    return {name: list(oracle(found)) for name, oracle in ORACLES.items()}


def lineage(journal: Sequence[Row]) -> list[Row]:
    """The updates that lead to the final weights: those of each iteration's last incarnation."""
    last: dict[int, int] = {}
    for row in journal:
        incarnation, iteration, _ = _numbers(row)
        last[iteration] = max(last.get(iteration, 0), incarnation)
    return [row for row in journal if last[_numbers(row)[1]] == _numbers(row)[0]]


def samples(found: Collected) -> Iterator[str]:
    if not _has_finished(found):
        return
    kept = lineage(found.journal)
    trained = Counter(sample.partition(".")[2] for row in kept if row["committed"] for sample in row["samples"])
    want = found.training.draws()
    if doubled := sorted(sample for sample, count in trained.items() if count > 1):
        yield f"{len(doubled)} samples are trained more than once: {', '.join(doubled[:5])}"
    if lost := sorted((want - trained).elements()):
        yield f"{len(lost)} samples are lost: {', '.join(lost[:5])}"
    if foreign := sorted(trained.keys() - want.keys()):
        yield f"{len(foreign)} samples are not the job's: {', '.join(foreign[:5])}"
    places = [(iteration, minibatch) for _, iteration, minibatch in map(_numbers, kept)]
    if places != sorted(set(places)):
        yield f"the updates of the lineage are not in order, each once: {places}"
    incarnations = [_numbers(row)[0] for row in kept]
    if incarnations != sorted(incarnations):
        yield f"an iteration continues weights of a later incarnation: {incarnations}"


def weights(found: Collected) -> Iterator[str]:
    if found.result is None or found.reference is None or not _has_finished(found):
        return
    checksum = found.result["summary"]["weights_checksum"]
    if checksum != found.reference:
        yield f"the final weights are {checksum}, those of the undisturbed run {found.reference}"


def owners(found: Collected) -> Iterator[str]:
    by_gpu: dict[str, list[Span]] = {}
    for span in found.spans:
        by_gpu.setdefault(span.gpu, []).append(span)
    for gpu, spans in by_gpu.items():
        yield from _overlaps(gpu, sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))
    granted = dict(reversed(list(_grants(found))))
    for sighting in found.sightings:
        for gpu, token in sighting.tokens.items():
            owner = granted.get((gpu, token))
            if owner is not None:
                yield from _strangers(gpu, owner, sighting, by_gpu.get(gpu, ()))


def _strangers(gpu: str, owner: str, sighting: Sighting, spans: Sequence[Span]) -> Iterator[str]:
    for span in spans:
        overlap_s = min(span.end_ns / 1e9, sighting.until_s) - max(span.start_ns / 1e9, sighting.at_s)
        if span.role != owner and overlap_s > _LEAST_OVERLAP_NS / 1e9:
            yield f"{gpu}: {span.role} ({span.state}) for {overlap_s * 1e3:.0f} ms after a token of {owner} has passed"


def _overlaps(gpu: str, spans: Sequence[Span]) -> Iterator[str]:
    last: dict[str, Span] = {}
    for span in spans:
        for role, other in last.items():
            overlap_ns = min(other.end_ns, span.end_ns) - span.start_ns
            if role != span.role and overlap_ns > _LEAST_OVERLAP_NS:
                yield f"{gpu}: {role} ({other.state}) and {span.role} ({span.state}) share {overlap_ns / 1e6:.0f} ms"
        if span.role not in last or span.end_ns > last[span.role].end_ns:
            last[span.role] = span


def tokens(found: Collected) -> Iterator[str]:
    for before, after in pairwise(found.sightings):
        for gpu, token in before.tokens.items():
            if (later := after.tokens.get(gpu, token)) < token:
                yield f"the gate of {gpu} went back from {token} to {later}"
    granted: dict[_Grant, str] = {}
    for key, role in _grants(found):
        if granted.setdefault(key, role) != role:
            yield f"token {key[1]} of {key[0]} was granted to {granted[key]} and to {role}"


def _grants(found: Collected) -> Iterator[tuple[_Grant, str]]:
    """Each GPU with a token, and the role that passed its gate with it."""
    for row in found.events:
        for grant in row.get("gpus_acquired", {}).get("grants", ()):
            token = int(grant["token"].get("term", 0)), int(grant["token"].get("counter", 0))
            yield (grant["gpu"], token), str(row["source"]).partition("@")[0]


def progress(found: Collected) -> Iterator[str]:
    for number, attempt in enumerate(found.attempts):
        if attempt.is_hung:
            yield f"start {number} did not end within its time"
        marks = [at for at in found.progress_s if attempt.begin_s < at < attempt.end_s]
        for begin, end in pairwise([attempt.begin_s, *marks, attempt.end_s]):
            held_s = _covered(begin, end, [(each.begin_s, each.end_s) for each in found.strikes])
            if end - begin - held_s > MOST_STILL_S:
                yield (
                    f"start {number} stood still for {end - begin:.0f} s, {begin - attempt.begin_s:.0f} s after its "
                    f"begin, with {held_s:.0f} s under a fault"
                )


def resumes(found: Collected) -> Iterator[str]:
    for number, attempt in enumerate(found.attempts):
        if attempt.end == _FINISHED or attempt.is_hung:
            continue
        if not _is_explained(found, attempt):
            yield f"start {number} ended with {attempt.exit_code} ({attempt.end}) for no fault that may end it"
        if "Traceback" in attempt.said:
            yield f"start {number} ended with a traceback"
        if attempt.exit_code > 0 and attempt.end != "cancelled" and "resume" not in attempt.said[-_LAST_WORDS:]:
            yield f"start {number} ended with {attempt.exit_code} and does not say how to go on"
    if not _has_finished(found):
        yield f"the job has not finished after {len(found.attempts)} starts"


def _is_explained(found: Collected, attempt: Attempt) -> bool:
    return any(
        (each.may_stop and each.begin_s < attempt.end_s and each.end_s > attempt.begin_s)
        or (each.may_refuse and attempt is _next_start(found, each))
        for each in found.strikes
    )


def _next_start(found: Collected, strike: Strike) -> Attempt | None:
    """The first start after a fault."""
    return next((each for each in found.attempts if each.begin_s > strike.end_s), None)


def summary(found: Collected) -> Iterator[str]:
    if found.result is None or not _has_finished(found):
        return
    told = found.result["summary"]
    rows = {int(row.get("iteration", 0)): row for row in found.result["job"].get("iterations", ())}
    want = set(range(found.training.iterations))
    numbers = sorted(rows)
    # The accounts of an iteration are gone with the stores that lost them. The journal has its samples all the same.
    if set(rows) != want and not (found.may_lose_records and set(rows) < want):
        yield f"the summary has the iterations {numbers} of {found.training.iterations}"
    kept = lineage(found.journal)
    trained = Counter(_numbers(row)[1] for row in kept for _ in row["samples"] if row["committed"])
    for number, row in rows.items():
        if int(row.get("num_trained", 0)) != trained[number]:
            yield (
                f"the summary has {row.get('num_trained', 0)} trained samples of iteration {number}, the lineage "
                f"{trained[number]}"
            )
    total = sum(trained[number] for number in rows)
    figures = {"samples_trained": total, "samples_generated": total, "lost": 0, "duplicates": 0}
    for name, want_count in figures.items():
        if told[name] != want_count:
            yield f"the summary says {name}={told[name]}, the lineage {want_count}"


def answers(found: Collected) -> Iterator[str]:
    for each in found.strikes:
        if each.wrong:
            yield each.wrong


def leftovers(found: Collected) -> Iterator[str]:
    for number, attempt in enumerate(found.attempts):
        for what in attempt.left_behind:
            yield f"start {number} left {what}"


ORACLES: dict[str, Callable[[Collected], Iterator[str]]] = {
    oracle.__name__: oracle
    for oracle in (samples, weights, owners, tokens, progress, resumes, summary, answers, leftovers)
}


def _has_finished(found: Collected) -> bool:
    return bool(found.attempts) and found.attempts[-1].end == _FINISHED


def _numbers(row: Row) -> tuple[int, int, int]:
    incarnation, iteration, minibatch = map(int, row["update"].split("."))
    return incarnation, iteration, minibatch


def _covered(begin: float, end: float, windows: Sequence[tuple[float, float]]) -> float:
    """How much of the time from begin to end lies in a window."""
    covered, at = 0.0, begin
    for start, stop in sorted(windows):
        start, stop = max(start, at), min(stop, end)
        if stop > start:
            covered += stop - start
            at = stop
    return covered
