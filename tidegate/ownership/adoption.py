"""Adoption: opens a store that is new, restarted or failed over, without relying on records that it may have lost.

Order:
1. Ask the gates of the nodes, and read the store.
2. Choose a term above every known term, and take it in the term register by compare-and-set.
3. Rebuild ownership from the records and the gates' reports.
4. In one write, store the rebuilt records and open the store.
If several adopters race, one wins and the others find the store open.

The term register keeps the term of the open store. Where the bus lost its data under an open store, the next scheduler
that starts tells it the term again.

A gate that could not be asked may know a larger term. Its node's instance tells it when it joins, and the store is then
shut and adopted again, above that term.

Whoever reaches the bus can write to the term register: a smaller term, or bytes that are no term. So the register is
never the last fence of the tokens. The gates are: each lets only larger tokens pass than its highest one, and tells
that one. What is no term counts as not known, and the new term replaces it. So tokens grow all the same.

Where the store has lost its data too, a term under which no token passed a gate may be given twice.

Where jobs share a store, an adopter has to ask the gates of all of them: what a missing gate has is taken for lost.
There the cluster adopts, and a job's scheduler waits for that (`adopted_by_another`).

Invariants:
- One adopter takes a term. [test_adoption: adopters_that_race]
- Bytes in the register that are no term stop no adoption. [test_adoption: a_register_without_a_term]
- A term is larger than that of every token that the register, the store or a reachable gate knows.
  [test_adoption: the_next_term_is_above]
- Who waits for another's adoption changes no record. [test_adoption: who_waits_for_another]
- The register knows the term of an open store to which a scheduler attached. [test_adoption: that_the_bus_has_lost]
- A GPU's token never falls. [test_ownership: tokens_only_grow]
- A GPU is `owned` only if its record and its gate agree on the token, or a step of an open transition is under way on
  it. It is `free` only if its gate reports no holder. Otherwise it is `lost`.
  [test_adoption: a_gpu_is_rebuilt_from_its_record]
- A transition stays open only if no gate and no record of its GPUs contradicts it. Otherwise it is closed.
  [test_adoption: a_transition_that_a_gate_contradicts]
- No GPU refers to a transition that is not open. [test_adoption: no_gpu_refers_to_a_closed_transition]
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from tidegate.ownership import transitions as rules
from tidegate.ownership.records import GateState, GpuRecord, GpuState, Transition, VersionConflict
from tidegate.ports.bus import StaleTerm, TermRegister
from tidegate.ports.store import Identity, StoreContents, StoreIdentity
from tidegate.types import GpuId, NodeId, Token, TransitionId, node_of

GateReports: TypeAlias = Mapping[NodeId, Sequence[GateState]]
"""The report of each reachable node's gate. A node without an entry is unreachable."""

AskGates: TypeAlias = Callable[[], Awaitable[GateReports]]

MAX_RACES = 8
"""Lost races before an adopter gives up. The winner of a race opens the store, unless it dies before its write."""


async def adopt(
    store: StoreIdentity,
    terms: TermRegister,
    ask_gates: AskGates,
    *,
    least_term: int = 0,
) -> Identity:
    """Open the store unless it is open, and attach to it. A store that is open under a term below `least_term` is shut
    first: a gate knows of that term, and the store and the register have lost it.

    VersionConflict: `MAX_RACES` races were lost. StoreUnavailable, BusUnavailable: call again, nothing is half done.
    """
    for _ in range(MAX_RACES):
        register_term, revision = await terms.read()
        found = await store.identity()
        if found.is_open and found.term >= least_term:
            if (register_term or 0) < found.term:
                # Avoid a term taken twice: a store that comes back empty, and its gates, may know no token of it.
                with suppress(StaleTerm):  # Another adopter was quicker.
                    await terms.advance(expected_revision=revision, term=found.term)
            return await store.attach()
        if found.is_open:
            with suppress(VersionConflict):  # Another adopter was quicker.
                await store.shut(expected=found)
            continue
        reports = await ask_gates()
        contents = await store.contents()
        term = next_term(max(register_term or 0, found.term, least_term - 1), reports, contents)
        try:
            await terms.advance(expected_revision=revision, term=term)
            await store.adopt(expected=found, term=term, rebuilt=rebuild(contents, reports))
        except (StaleTerm, VersionConflict):  # Retry: another adopter was quicker and may have opened the store.
            continue
        return await store.attach()
    raise VersionConflict(f"the store was not adopted: {MAX_RACES} races lost to other adopters; try again")


async def adopted_by_another(
    store: StoreIdentity, terms: TermRegister, ask_gates: AskGates, *, least_term: int = 0
) -> Identity:
    """Attach to a store that somebody else adopts. One that is open under a term below `least_term` is shut, and the
    register told, so that it is adopted again with that term at least. `ask_gates` is not called.

    StoreNotAdopted: it is not open now. StoreUnavailable, BusUnavailable: call again."""
    found = await store.identity()
    if found.is_open and found.term < least_term:
        register_term, revision = await terms.read()
        if (register_term or 0) < least_term - 1:
            with suppress(StaleTerm):  # Another one was quicker.
                await terms.advance(expected_revision=revision, term=least_term - 1)
        with suppress(VersionConflict):
            await store.shut(expected=found)
    return await store.attach()


def next_term(last_term: int, reports: GateReports, contents: StoreContents) -> int:
    """One above every term that the register, the store and the reachable gates know."""
    tokens = [record.token for record in contents.gpus]
    tokens += [seen.highest_token for report in reports.values() for seen in report if seen.highest_token]
    return max([last_term, *(token.term for token in tokens)]) + 1


def rebuild(contents: StoreContents, reports: GateReports) -> StoreContents:
    """The new contents of the store: every GPU that a record or a gate knows, and every transition, open or closed."""
    seen = {state.gpu: state for report in reports.values() for state in report}
    records = {record.gpu: record for record in contents.gpus}
    transitions = []
    for transition in contents.transitions:
        if not _agrees(transition, records, seen):
            change = rules.close(transition, records, rules.earned_outcome(transition))
            records.update({record.gpu: record for record in change.gpus})
            transition = change.transition
        transitions.append(transition)
    opened = {transition.id for transition in transitions if transition.is_open}
    rebuilt = {gpu: _rebuilt(record, seen.get(gpu), reports, opened) for gpu, record in records.items()}
    for gpu, state in seen.items():
        if gpu not in records and state.highest_token is not None:
            rebuilt[gpu] = _unrecorded(state, state.highest_token)
    return StoreContents(tuple(rebuilt[gpu] for gpu in sorted(rebuilt)), tuple(transitions))


def _agrees(transition: Transition, records: Mapping[GpuId, GpuRecord], seen: Mapping[GpuId, GateState]) -> bool:
    for move in transition.moves:
        record = records.get(move.gpu)
        if record is None or record.token != move.token or record.transition != transition.id:
            return False
        if move.gpu in seen and _is_newer(seen[move.gpu], record):
            return False
    return True


def _rebuilt(
    record: GpuRecord, seen: GateState | None, reports: GateReports, opened: Collection[TransitionId]
) -> GpuRecord:
    if record.transition not in opened:
        record = replace(record, transition=None)
    if node_of(record.gpu) not in reports:
        return replace(record, state=GpuState.LOST)
    if seen is not None and seen.highest_token is not None and _is_newer(seen, record):
        return _unrecorded(seen, seen.highest_token)
    if seen is not None and seen.held:
        agrees = seen.highest_token == record.token and record.state is GpuState.OWNED
        return record if agrees else replace(record, state=GpuState.LOST)
    if record.state is GpuState.OWNED and record.transition is not None:
        return record  # Its release or its acquisition is under way. An event will report the end.
    return replace(record, state=GpuState.FREE, owner=None)


def _is_newer(seen: GateState, record: GpuRecord) -> bool:
    """Whether the gate knows a token that the store granted and then lost from its records."""
    return seen.highest_token is not None and seen.highest_token > record.token


def _unrecorded(seen: GateState, token: Token) -> GpuRecord:
    """The record of a GPU with an unknown last owner."""
    return GpuRecord(seen.gpu, GpuState.LOST if seen.held else GpuState.FREE, None, token)
