"""The actor's own account of every sample: the authority on what was trained, advanced at the optimizer's commit.

A ledger is a value: each step returns the next one, so that what a checkpoint saves is what was in force.
Invariants, kept by every step and checked again when one is loaded:
- a sample has at most one fate (trained, filtered or discarded, the last two with a reason);
- only samples of the open iteration, in this incarnation, get a fate;
- an iteration closes only when each of its ids has one, and no other; what is closed never changes;
- iterations follow each other with no prompt between them, and none in two of them;
- `num_trained` is the number of samples in the optimizer commits that lead to the present weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tidegate.types import SampleId

FORMAT_VERSION = 2


class LedgerError(ValueError):
    """A step that would lose or double a sample, refused with nothing changed."""


class Verdict(StrEnum):
    """What becomes of a group that arrives."""

    NEW = "new"
    SEEN = "seen"
    SUPERSEDED = "superseded"
    NOT_EXPECTED = "not_expected"


@dataclass(frozen=True, slots=True)
class OpenIteration:
    """The ids an iteration expects, and the fate each has so far ("" for trained, else `filtered:...` and so on).

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
        """All ids that have met their fate."""
        return self.trained.union(*self.filtered.values(), *self.discarded.values())


@dataclass(frozen=True, slots=True)
class ClosedIteration:
    """What is kept of an iteration that is over: counts."""

    iteration: int
    num_trained: int
    num_filtered: int
    num_discarded: int


@dataclass(frozen=True, slots=True)
class SampleLedger:
    """See the module. `open_iteration` is None between iterations."""

    incarnation: int
    open_iteration: OpenIteration | None = None
    closed: tuple[ClosedIteration, ...] = ()
    num_trained: int = 0
    next_prompt: int = 0
    """The first that no iteration has taken."""

    def opened(self, iteration: OpenIteration) -> SampleLedger:
        """Start an iteration; LedgerError unless it is the one that follows and none is open."""
        want = self.closed[-1].iteration + 1 if self.closed else 0
        if self.open_iteration is not None:
            raise LedgerError(
                f"iteration {iteration.iteration} cannot open: iteration {self.open_iteration.iteration} is open"
            )
        if iteration.iteration != want:
            raise LedgerError(f"iteration {iteration.iteration} cannot open: {want} is the one that follows")
        if iteration.first_prompt != self.next_prompt:
            raise LedgerError(
                f"iteration {want} cannot open at prompt {iteration.first_prompt}: {self.next_prompt} is the next one"
            )
        return replace(self, open_iteration=iteration)

    def taking(self, num_prompts: int) -> SampleLedger:
        """The open iteration takes so many prompts, extra ones among them."""
        now = self._open()
        most = now.num_prompts + now.max_extra_prompts
        if not now.num_prompts <= num_prompts <= most:
            raise LedgerError(
                f"iteration {now.iteration} cannot take {num_prompts} prompts: it has {now.num_prompts}, at most {most}"
            )
        grown = replace(now, num_prompts=num_prompts, max_extra_prompts=most - num_prompts)
        return replace(self, open_iteration=grown)

    def expected_ids(self) -> frozenset[SampleId]:
        """Every id of the open iteration."""
        return self._ids(self._open().num_prompts)

    def possible_ids(self) -> frozenset[SampleId]:
        """Those, and the ids of extra prompts."""
        return self._ids(self._open().num_prompts + self._open().max_extra_prompts)

    def verdict(self, ids: Iterable[SampleId]) -> Verdict:
        """Whether a group that arrives is to be used."""
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
        """The optimizer applied update `update_id` over these samples."""
        now, fated = self._open(), self._fated(ids)
        if update_id in now.updates:
            raise LedgerError(f"update {update_id} is committed already; an update enters the lineage once")
        opened = replace(now, trained=now.trained | fated, updates=(*now.updates, update_id))
        return replace(self, open_iteration=opened, num_trained=self.num_trained + len(fated))

    def filtered(self, ids: Iterable[SampleId], *, reason: str) -> SampleLedger:
        """These samples take no part in training, by choice of the algorithm."""
        now = self._open()
        fates = {**now.filtered, reason: now.filtered.get(reason, frozenset()) | self._fated(ids)}
        return replace(self, open_iteration=replace(now, filtered=fates))

    def discarded(self, ids: Iterable[SampleId], *, reason: str) -> SampleLedger:
        """These samples could not be used."""
        now = self._open()
        fates = {**now.discarded, reason: now.discarded.get(reason, frozenset()) | self._fated(ids)}
        return replace(self, open_iteration=replace(now, discarded=fates))

    def missing(self) -> frozenset[SampleId]:
        """Ids of the open iteration without a fate."""
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
                f"iteration {now.iteration} cannot close: {len(beyond)} samples have a fate and are of prompts that it "
                f"did not take, {beyond[0]} among them"
            )
        over = ClosedIteration(
            iteration=now.iteration,
            num_trained=len(now.trained),
            num_filtered=sum(map(len, now.filtered.values())),
            num_discarded=sum(map(len, now.discarded.values())),
        )
        next_prompt = now.first_prompt + now.num_prompts
        return replace(self, open_iteration=None, closed=(*self.closed, over), next_prompt=next_prompt)

    def resumed(self, incarnation: int) -> SampleLedger:
        """The ledger of a checkpoint, taken up by a later incarnation of the job."""
        if incarnation <= self.incarnation:
            raise LedgerError(f"incarnation {incarnation} does not follow the checkpoint's {self.incarnation}")
        if self.open_iteration is not None:
            raise LedgerError(f"the checkpoint holds iteration {self.open_iteration.iteration} half done")
        return replace(self, incarnation=incarnation)

    def to_json(self) -> str:
        """Of a ledger between iterations, which is when checkpoints are saved."""
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
        """Inverse of `to_json`; LedgerError on a newer format or numbers that do not add up."""
        raw: dict[str, Any] = json.loads(text)
        if raw.get("format") != FORMAT_VERSION:
            raise LedgerError(f"ledger format {raw.get('format')} is not {FORMAT_VERSION}, the one this version reads")
        closed = tuple(ClosedIteration(*row) for row in raw["closed"])
        total = sum(iteration.num_trained for iteration in closed)
        if [iteration.iteration for iteration in closed] != list(range(len(closed))) or total != raw["num_trained"]:
            raise LedgerError(
                f"ledger does not add up: {len(closed)} iterations hold {total} trained samples, "
                f"num_trained says {raw['num_trained']}"
            )
        return cls(raw["incarnation"], closed=closed, num_trained=raw["num_trained"], next_prompt=raw["next_prompt"])

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

    def _fated(self, ids: Iterable[SampleId]) -> frozenset[SampleId]:
        listed = list(ids)
        fated = frozenset(listed)
        if len(listed) != len(fated):
            raise LedgerError(f"{len(listed) - len(fated)} samples are named twice in one step")
        if foreign := sorted(fated - self.possible_ids()):
            raise LedgerError(f"{len(foreign)} samples are not of the open iteration, {foreign[0]} among them")
        if again := sorted(fated & self._open().with_fate()):
            raise LedgerError(f"{len(again)} samples have met their fate already, {again[0]} among them")
        return fated
