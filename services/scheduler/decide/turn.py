"""One turn of the scheduler, and the one place of its order. Pure.

1. Fold the events that came (`evolve`), and before them those that a lost state had seen (`recovered`).
2. Look: what the store says of ownership is folded like an event.
3. Decide, where a decision is due.
4. Note in the state what was decided.

`turn` does all four. Where ownership has to be read for the GPUs that the folded state names, the caller reads it
between `begin`, which is step 1, and `finish`, which is the rest.

Invariants:
- Another replica that takes the same turns comes to the same state and commands.
  [test_replay: replays_to_the_same_commands]
- A turn in which no decision is due only folds. [test_turn: that_is_not_due_only_folds]
- A state that breaks an invariant is refused with the numbers. [test_turn: breaks_an_invariant_is_refused]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.scheduler.decide.decision import Decision, Propose, after_decision, decide
from services.scheduler.decide.pacing import Pace
from services.scheduler.decide.proposals import proposal_of
from services.scheduler.evolve.fold import evolve
from services.scheduler.evolve.recovering import recovered
from services.scheduler.policy import Policy
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.invariants import check


class StateBroken(AssertionError):
    """A state breaks an invariant. It is never written, and no command is issued on it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`states` are those that the turn went through, from the one that it began with to the one to write. `decision` is
    None where none is due."""

    states: tuple[ClusterState, ...]
    decision: Decision | None = None

    @property
    def before(self) -> ClusterState:
        return self.states[0]

    @property
    def folded(self) -> ClusterState:
        """The state with all events folded: a decision is made on it."""
        return self.states[-1] if self.decision is None else self.states[-2]

    @property
    def decided(self) -> Decision:
        """The decision of a turn without a pace: it always makes one."""
        assert self.decision is not None, "no decision was due"
        return self.decision

    @property
    def after(self) -> ClusterState:
        """The state to write."""
        return self.states[-1]


def turn(
    state: ClusterState,
    now_ms: int,
    policy: Policy,
    *,
    events: Iterable[ev.Event] = (),
    pace: Pace | None = None,
    propose: Propose = proposal_of,
) -> Turn:
    """A whole turn. `events` come in order, what the store says of ownership among them. `pace`: None decides at once.
    `propose` stands between the state and the policy."""
    return finish(begin(state, events), now_ms, policy, pace=pace, propose=propose)


def begin(state: ClusterState, events: Iterable[ev.Event], *, missed: Sequence[ev.Event] = ()) -> Turn:
    """Step 1. `missed` are events that were acknowledged and that the state does not hold: it was lost."""
    states = [state]
    if missed:
        states.append(recovered(state, missed))
    for event in events:
        states.append(evolve(states[-1], event))
    return Turn(tuple(states))


def finish(
    begun: Turn,
    now_ms: int,
    policy: Policy,
    *,
    observed: ev.OwnershipObserved | None = None,
    pace: Pace | None = None,
    propose: Propose = proposal_of,
) -> Turn:
    """Steps 2 to 4. `observed`: what the store says of ownership; None where it was not read, or says nothing new."""
    states = begun.states
    if observed is not None:
        event = ev.Event(job=begun.before.job, source="scheduler", boot=0, sequence=0, body=observed)
        states = (*states, evolve(begun.after, event))
    if pace is not None and not pace.is_due(begun.before, states[-1], now_ms):
        return Turn(states)
    decision = decide(states[-1], now_ms, policy=policy, propose=propose)
    return Turn((*states, after_decision(states[-1], decision, now_ms)), decision)


def checked(*states: ClusterState) -> ClusterState:
    """The last of states that follow one another. StateBroken where one of them breaks an invariant."""
    for before, after in pairwise(states):
        if after is not before and (violations := check(before, after)):
            raise StateBroken("; ".join(map(str, violations)))
    return states[-1]
