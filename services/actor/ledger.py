"""The actor's own account of every sample.

It is the authority on the trained samples, and advances at optimizer commits.

A ledger is a value: each step returns the next ledger. A checkpoint thus saves the ledger that was in force.
A fate is trained, filtered or discarded; the last two have a reason.

Invariants:
- A sample has at most one fate. [test_ledger: each_sample_has_at_most_one_fate]
- Only samples of the open iteration get a fate. [test_ledger: would_break_the_account]
- Only samples of this incarnation get a fate. [test_ledger: another_incarnation_gets_no_fate]
- An iteration closes only when each of its samples has a fate. [test_ledger: missing_samples_are_named]
- An iteration does not close while a sample of a prompt that it did not take has a fate.
  [test_ledger: closes_with_the_prompts_that_it_took]
- A closed iteration never changes. [test_ledger: a_closed_iteration_never_changes]
- Iteration numbers follow each other without a gap. [test_ledger: iterations_follow_one_another]
- No prompt lies between two iterations, and none is in two of them. [test_ledger: next_iteration_begins_after_them]
- `num_trained` is the number of samples in the optimizer commits that lead to the present weights.
  [test_ledger: num_trained_counts_committed_samples]
- A loaded ledger's numbers add up. [test_ledger: numbers_do_not_add_up]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidegate.json_text import parse_json, typed, whole_number
from tidegate.types import SampleId

FORMAT_VERSION = 2


class LedgerError(ValueError):
    """A step would lose or double a sample. The ledger refuses it and stays as it is."""


class Verdict(StrEnum):
    """The ledger's answer for a group that arrives: only a NEW group is trained."""

    NEW = "new"
    SEEN = "seen"
    SUPERSEDED = "superseded"
    NOT_EXPECTED = "not_expected"


@dataclass(frozen=True, slots=True)
class OpenIteration:
    """The samples that an iteration expects, and their fates so far: `filtered` and `discarded` are keyed by reason.

    `num_prompts` may grow by up to `max_extra_prompts`."""

    iteration: int
    first_prompt: int
    num_prompts: int
    group_size: int
    version: int
    max_extra_prompts: int = 0
    trained: frozenset[SampleId] = frozenset()
    filtered: Mapping[str, frozenset[SampleId]] = field(default_factory=dict)
    discarded: Mapping[str, frozenset[SampleId]] = field(default_factory=dict)
    updates: tuple[str, ...] = ()

    def with_fate(self) -> frozenset[SampleId]:
        """The ids of all samples that have a fate."""
        return self.trained.union(*self.filtered.values(), *self.discarded.values())


@dataclass(frozen=True, slots=True)
class ClosedIteration:
    """The counts that the ledger keeps of an iteration after its end."""

    iteration: int
    num_trained: int
    num_filtered: int
    num_discarded: int


@dataclass(frozen=True, slots=True)
class SampleLedger:
    """`open_iteration` is None between iterations; see the module."""

    incarnation: int
    open_iteration: OpenIteration | None = None
    closed: tuple[ClosedIteration, ...] = ()
    num_trained: int = 0
    next_prompt: int = 0
    """The first prompt that no iteration has taken."""

    def opened(self, iteration: OpenIteration) -> SampleLedger:
        """Start an iteration. Raises LedgerError where another is open, or where this is not the next one."""
        want = self.closed[-1].iteration + 1 if self.closed else 0
        if self.open_iteration is not None:
            raise LedgerError(
                f"iteration {iteration.iteration} cannot open: iteration {self.open_iteration.iteration} is open"
            )
        if iteration.iteration != want:
            raise LedgerError(f"iteration {iteration.iteration} cannot open: iteration {want} is the next one")
        if iteration.first_prompt != self.next_prompt:
            raise LedgerError(
                f"iteration {want} cannot open at prompt {iteration.first_prompt}: "
                f"the next prompt is {self.next_prompt}"
            )
        return replace(self, open_iteration=iteration)

    def taking(self, num_prompts: int) -> SampleLedger:
        """Set the number of prompts that the open iteration takes, extra prompts included."""
        now = self._open()
        most = now.num_prompts + now.max_extra_prompts
        if not now.num_prompts <= num_prompts <= most:
            raise LedgerError(
                f"iteration {now.iteration} cannot take {num_prompts} prompts: it has {now.num_prompts}, at most {most}"
            )
        grown = replace(now, num_prompts=num_prompts, max_extra_prompts=most - num_prompts)
        return replace(self, open_iteration=grown)

    def expected_ids(self) -> frozenset[SampleId]:
        """The ids of all samples of the open iteration, extra prompts that it may still take excluded."""
        return self._ids(self._open().num_prompts)

    def possible_ids(self) -> frozenset[SampleId]:
        """The expected ids, and the ids of extra prompts that the iteration may still take."""
        return self._ids(self._open().num_prompts + self._open().max_extra_prompts)

    def verdict(self, ids: Iterable[SampleId]) -> Verdict:
        """The verdict on a group that arrives with these ids."""
        ids = frozenset(ids)
        if any(sample.incarnation < self.incarnation for sample in ids):
            return Verdict.SUPERSEDED
        closed_below = self.closed[-1].iteration + 1 if self.closed else 0
        if ids and all(sample.incarnation == self.incarnation and sample.iteration < closed_below for sample in ids):
            return Verdict.SEEN
        if self.open_iteration is None or not ids or not ids <= self.possible_ids():
            return Verdict.NOT_EXPECTED
        return Verdict.SEEN if ids <= self.open_iteration.with_fate() else Verdict.NEW

    def committed(self, update_id: str, ids: Iterable[SampleId]) -> SampleLedger:
        """Record that the optimizer applied update `update_id` to these samples."""
        now, samples = self._open(), self._checked(ids)
        if update_id in now.updates:
            raise LedgerError(f"update {update_id} is committed already; an update enters the lineage only once")
        opened = replace(now, trained=now.trained | samples, updates=(*now.updates, update_id))
        return replace(self, open_iteration=opened, num_trained=self.num_trained + len(samples))

    def filtered(self, ids: Iterable[SampleId], *, reason: str) -> SampleLedger:
        """Record that the algorithm leaves these samples out of training."""
        now = self._open()
        fates = {**now.filtered, reason: now.filtered.get(reason, frozenset()) | self._checked(ids)}
        return replace(self, open_iteration=replace(now, filtered=fates))

    def discarded(self, ids: Iterable[SampleId], *, reason: str) -> SampleLedger:
        """Record that these samples could not be used."""
        now = self._open()
        fates = {**now.discarded, reason: now.discarded.get(reason, frozenset()) | self._checked(ids)}
        return replace(self, open_iteration=replace(now, discarded=fates))

    def missing(self) -> frozenset[SampleId]:
        """The ids of the open iteration's samples without a fate."""
        return self.expected_ids() - self._open().with_fate()

    def closed_now(self) -> SampleLedger:
        """End the open iteration; LedgerError, naming some, while ids are without a fate."""
        now = self._open()
        if missing := sorted(self.missing()):
            some = ", ".join(map(str, missing[:5]))
            raise LedgerError(
                f"iteration {now.iteration} cannot close: {len(missing)} samples have no fate ({some} ...)"
            )
        if beyond := sorted(now.with_fate() - self.expected_ids()):
            raise LedgerError(
                f"iteration {now.iteration} cannot close: {len(beyond)} samples have a fate though it did not take "
                f"their prompts, {beyond[0]} among them"
            )
        summary = ClosedIteration(
            iteration=now.iteration,
            num_trained=len(now.trained),
            num_filtered=sum(map(len, now.filtered.values())),
            num_discarded=sum(map(len, now.discarded.values())),
        )
        next_prompt = now.first_prompt + now.num_prompts
        return replace(self, open_iteration=None, closed=(*self.closed, summary), next_prompt=next_prompt)

    def resumed(self, incarnation: int) -> SampleLedger:
        """This ledger, loaded from a checkpoint, for a later incarnation of the job."""
        if incarnation <= self.incarnation:
            raise LedgerError(f"incarnation {incarnation} does not follow the checkpoint's {self.incarnation}")
        if self.open_iteration is not None:
            raise LedgerError(f"the checkpoint holds iteration {self.open_iteration.iteration}, which is not complete")
        return replace(self, incarnation=incarnation)

    def to_json(self) -> str:
        """JSON of a ledger between iterations.

        Raises LedgerError while one is open: checkpoints are saved between them."""
        if self.open_iteration is not None:
            raise LedgerError(f"iteration {self.open_iteration.iteration} is open; close it before saving")
        rows = [[c.iteration, c.num_trained, c.num_filtered, c.num_discarded] for c in self.closed]
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "incarnation": self.incarnation,
                "num_trained": self.num_trained,
                "next_prompt": self.next_prompt,
                "closed": rows,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> SampleLedger:
        """The inverse of `to_json`. Raises LedgerError on an unknown format, or on numbers that do not add up."""
        try:
            raw = typed(dict, parse_json(text), "ledger")
            if raw.get("format") != FORMAT_VERSION:
                found = raw.get("format")
                raise LedgerError(f"ledger format {found} is not {FORMAT_VERSION}, the one this version reads")
            closed = tuple(ClosedIteration(*(whole_number(count, "a count") for count in row)) for row in raw["closed"])
            names = ("incarnation", "num_trained", "next_prompt")
            incarnation, num_trained, next_prompt = (whole_number(raw[name], name) for name in names)
        except LedgerError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"ledger is damaged ({type(error).__name__}: {error})") from error
        total = sum(iteration.num_trained for iteration in closed)
        if [iteration.iteration for iteration in closed] != list(range(len(closed))) or total != num_trained:
            raise LedgerError(
                f"ledger does not add up: {len(closed)} iterations hold {total} trained samples, "
                f"num_trained says {num_trained}"
            )
        return cls(incarnation, closed=closed, num_trained=num_trained, next_prompt=next_prompt)

    def _open(self) -> OpenIteration:
        if self.open_iteration is None:
            raise LedgerError("no iteration is open")
        return self.open_iteration

    def _ids(self, num_prompts: int) -> frozenset[SampleId]:
        now = self._open()
        return frozenset(
            SampleId(self.incarnation, now.iteration, prompt, draw)
            for prompt in range(now.first_prompt, now.first_prompt + num_prompts)
            for draw in range(now.group_size)
        )

    def _checked(self, ids: Iterable[SampleId]) -> frozenset[SampleId]:
        """The ids as a set. Raises LedgerError unless each may get a fate now."""
        listed = list(ids)
        checked = frozenset(listed)
        if len(listed) != len(checked):
            raise LedgerError(f"{len(listed) - len(checked)} samples are named twice in one step")
        if foreign := sorted(checked - self.possible_ids()):
            raise LedgerError(f"{len(foreign)} samples are not of the open iteration, {foreign[0]} among them")
        if again := sorted(checked & self._open().with_fate()):
            raise LedgerError(f"{len(again)} samples have a fate already, {again[0]} among them")
        return checked
