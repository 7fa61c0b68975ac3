"""A small shell around `turn`: deliver, observe, check, execute. Time moves only when nothing else can happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from services.scheduler.decide.decision import Decision
from services.scheduler.decide.expectations import next_due_ms
from services.scheduler.decide.policy_view import situation_of
from services.scheduler.decide.proposals import PolicyAnswer, proposal_of
from services.scheduler.decide.turn import Turn, begin, checked, turn
from services.scheduler.policy import Policy, Proposal
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.state import commands as cmd
from services.scheduler.state import events as ev
from services.scheduler.state.cluster_state import TERMINAL, ClusterState
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import JOB

MAX_STEPS = 4000


@dataclass
class Drive:
    """One job with its scheduler. `seen` holds the scheduler's events and decisions, in order."""

    cluster: FakeCluster
    state: ClusterState = field(default_factory=lambda: ClusterState(job=JOB))
    now_ms: int = 1_000_000
    seen: list[tuple[ev.Event | None, int, Decision | None]] = field(default_factory=list)
    last_reason: str = ""
    delivered: list[ev.Event] = field(default_factory=list)
    num_losses: int = 0
    """The number of next decisions whose commands are lost: a scheduler dies after it wrote its state."""
    num_done_before: int = 0
    """The commands of such a decision that are done before the scheduler dies."""
    num_delays: int = 0
    """The number of next decisions whose commands to leads are late: the cluster keeps them."""
    launcher_boot: int = 0
    """Nothing is decided before the submission of this launcher's start, as in the shell."""
    num_streams: int = 1
    """`delivered` has the events of the last stream."""
    lacks_accounts: bool = False
    """The state and the events of some iterations were lost together: only `events.jsonl` has their accounts."""
    is_new: bool = False
    """A scheduler has started after such a death, and has not decided yet."""
    propose: Callable[[ClusterState], Proposal] | None = None
    """It proposes in place of the policy, if set."""
    policy: Policy = field(default_factory=StaticPolicy)

    def deliver(self, event: ev.Event) -> None:
        self.delivered.append(event)
        self.decide(event)

    def decide(self, *events: ev.Event) -> list[cmd.Command]:
        """Take turns until the store and the state agree, as the shell does."""
        done: list[cmd.Command] = []
        for _ in range(50):
            self._fold(events)
            events = ()
            if self.state.is_of_start_before(self.launcher_boot):
                return done
            decision = self._turn()
            if not decision.commands:
                return done
            if self.num_losses:
                self.num_losses -= 1
                self.is_new = True
                self.cluster.execute(decision.commands[: self.num_done_before])
                return done
            late = [each for each in decision.commands if self.num_delays and isinstance(each, cmd.LeadCommand)]
            self.num_delays -= bool(late)
            self.cluster.late += late
            self.cluster.execute([each for each in decision.commands if each not in late])
            done += decision.commands
        raise AssertionError(f"50 decisions without an end; the last: {decision}")

    def _fold(self, events: Sequence[ev.Event]) -> None:
        """The store is adopted again where a gate knows a token that it has lost."""
        self._take(begin(self.state, events), events)
        store = self.cluster.store
        if lost_term := self.state.lost_term(store.term, records=store.gpus):
            self.cluster.adopt(self.state, least_term=lost_term + 1)

    def _turn(self) -> Decision:
        observed = self.cluster.observed()
        made = turn(self.state, self.now_ms, self.policy, events=[observed], propose=self._proposed)
        assert made.decided.reason, "every decision has a reason"
        self._take(made, [observed])
        self.seen.append((None, self.now_ms, made.decided))
        self.last_reason = made.decided.reason
        return made.decided

    def _take(self, made: Turn, events: Sequence[ev.Event]) -> None:
        self.seen += [(event, self.now_ms, None) for event in events]
        for before, state in pairwise(made.states):
            # No state may make this raise, whatever is reported and whatever moves.
            if state is not before:
                situation_of(state, self.now_ms)
        self.state = checked(*made.states)
        self.cluster.store.saved_version = self.state.version

    def _proposed(self, state: ClusterState, policy: Policy, now_ms: int) -> PolicyAnswer:
        if self.propose is None:
            return proposal_of(state, policy, now_ms)
        return PolicyAnswer(self.propose(state), state.remembered)

    def step(self, index: int = 0) -> bool:
        """Do the next event, work, restart or wait; False when nothing can happen."""
        if self.cluster.outbox:
            self.deliver(self.cluster.outbox.pop(index % len(self.cluster.outbox)))
        elif self.cluster.work() or self.cluster.restart_dead() or self.cluster.renew():
            return True
        else:
            due_ms = next_due_ms(self.state)
            if due_ms is None and self.is_new:
                due_ms, self.is_new = self.now_ms, False
            if due_ms is None:
                return False
            self.now_ms = max(self.now_ms, due_ms)
            self.decide()
        return True

    def run(self) -> ClusterState:
        """Go on to the job's end."""
        for _ in range(MAX_STEPS):
            if self.state.phase in TERMINAL:
                return self.state
            if not self.step():
                break
        raise AssertionError(f"the job does not end: {self.last_reason}")

    def run_until(self, condition: Callable[[ClusterState], bool]) -> ClusterState:
        for _ in range(MAX_STEPS):
            if condition(self.state):
                return self.state
            if not self.step():
                break
        raise AssertionError(f"the condition never holds: {self.last_reason}")


def booted(cluster: FakeCluster) -> Drive:
    drive = Drive(cluster)
    cluster.boot()
    return drive
