"""Adoption: how a store that is new, restarted or failed over is opened again without trusting what it lost.

In order: a term above all that anyone saw, taken in the term register by compare-and-set; ownership rebuilt from what
the nodes' gates report; then, in one write, the rebuilt records and the store's opening. Of two who adopt at once one
wins, and the other finds the store open.

Invariants:
- a term is taken by one adopter only, and is larger than every token that the register, the store or a reachable gate
  knows; a GPU's token never falls;
- a GPU is `owned` afterwards only if its record and its gate agree on the token, or an open transition's step is under
  way on it; `free` only if its gate was asked and nobody holds it; else `lost`;
- an open transition goes on only if all its GPUs are as its record says; one that does not is closed, and what refers
  to a transition without a record lets go of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from tidegate.ownership import transitions as rules
from tidegate.ownership.records import GateState, GpuRecord, GpuState, Transition, VersionConflict
from tidegate.ports.bus import StaleTerm, TermRegister
from tidegate.ports.store import Identity, StoreContents, StoreIdentity
from tidegate.types import GpuId, NodeId, Token, TransitionId, node_of

GateReports: TypeAlias = Mapping[NodeId, Sequence[GateState]]
"""What each reachable node's gate says; a node that is missing could not be reached."""

MAX_RACES = 8
"""Lost races before an adopter gives up. Whoever wins one opens the store, unless it dies in between."""


async def adopt(store: StoreIdentity, terms: TermRegister, ask_gates: Callable[[], Awaitable[GateReports]]) -> Identity:
    """Opens the store unless it is open, and attaches to it.

    VersionConflict after `MAX_RACES` lost races; StoreUnavailable and BusUnavailable: call again, nothing is half done.
    """
    for _ in range(MAX_RACES):
        found = await store.identity()
        if found.is_open:
            return await store.attach()
        register_term, revision = await terms.read()
        reports = await ask_gates()
        contents = await store.contents()
        term = next_term(max(register_term, found.term), reports, contents)
        try:
            await terms.advance(expected_revision=revision, term=term)
            await store.adopt(expected=found, term=term, rebuilt=rebuild(contents, reports))
        except (StaleTerm, VersionConflict):  # another adopter was quicker: look at what it made
            continue
        return await store.attach()
    raise VersionConflict(f"the store was not adopted: {MAX_RACES} races lost to other adopters; try again")


def next_term(last_term: int, reports: GateReports, contents: StoreContents) -> int:
    """One above every term that the register, the store and the reachable gates know of."""
    tokens = [record.token for record in contents.gpus]
    tokens += [seen.highest_token for report in reports.values() for seen in report if seen.highest_token]
    return max([last_term, *(token.term for token in tokens)]) + 1


def rebuild(contents: StoreContents, reports: GateReports) -> StoreContents:
    """What the store shall hold: all GPUs that a record or a gate knows, and the transitions, going on or closed."""
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
        return record  # its release or its acquisition is under way, and an event will tell of it
    return replace(record, state=GpuState.FREE, owner=None)


def _is_newer(seen: GateState, record: GpuRecord) -> bool:
    """Somebody passed the gate under a token that the store no longer knows it granted."""
    return seen.highest_token is not None and seen.highest_token > record.token


def _unrecorded(seen: GateState, token: Token) -> GpuRecord:
    """A GPU whose last owner nobody knows."""
    return GpuRecord(seen.gpu, GpuState.LOST if seen.held else GpuState.FREE, None, token)
