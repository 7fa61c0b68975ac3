"""One turn of the scheduler. The order of its steps is stated here alone. Pure.

1. Fold: fold the new events into the state (`evolve`). After the loss of a state, first fold the events that it had
   seen (`recovered`).
2. Look: fold the store's ownership records like an event.
3. Decide, where a decision is due.
4. Note: write the decision into the state.

`turn` does all four steps. A caller that reads ownership for the GPUs that the folded state names does it in between:
`begin` is step 1, and `finish` is steps 2 to 4.

Invariants:
- Another replica that takes the same turns comes to the same state and commands.
  [test_replay: replays_to_the_same_commands]
- A turn without a due decision only folds. [test_turn: that_is_not_due_only_folds]
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
    """`states` are all states of the turn, from its first to the one to write. `decision` is None where none is due."""

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
    """A whole turn. `events` are in order and include the store's ownership records. Without a `pace` it decides
    at once. `propose` asks the policy on the state."""
    return finish(begin(state, events), now_ms, policy, pace=pace, propose=propose)


def begin(state: ClusterState, events: Iterable[ev.Event], *, missed: Sequence[ev.Event] = ()) -> Turn:
    """Step 1. `missed` are acknowledged events that the state does not hold, because an earlier state was lost."""
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
    """Steps 2 to 4. `observed` is None where ownership was not read, or says nothing new."""
    states = begun.states
    if observed is not None:
        event = ev.Event(job=begun.before.job, source="scheduler", boot=0, sequence=0, body=observed)
        states = (*states, evolve(begun.after, event))
    if pace is not None and not pace.is_due(begun.before, states[-1], now_ms):
        return Turn(states)
    decision = decide(states[-1], now_ms, policy=policy, propose=propose)
    return Turn((*states, after_decision(states[-1], decision, now_ms)), decision)


def checked(*states: ClusterState) -> ClusterState:
    """The last of consecutive states. StateBroken where one of them breaks an invariant."""
    for before, after in pairwise(states):
        if after is not before and (violations := check(before, after)):
            raise StateBroken("; ".join(map(str, violations)))
    return states[-1]
