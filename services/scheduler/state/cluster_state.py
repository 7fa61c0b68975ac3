"""All that the scheduler knows of one job. No replica remembers anything that is not in a `ClusterState`.

Its parts are in `components`, `course`, `issued`, `observed`, `learned`, `manual_moves` and `remembered`. `gpus` and
`transitions` are the ownership store's, as last read. A component's `grants` are those of its committed layout whose
holders are not known to be dead. `version` counts structural changes and guards transitions. `invariants.check` checks
every state.

Invariants:
- A state is frozen and made of values only, so that the codec writes and reads it exactly.
  [test_codec: every_state_of_a_job]
- Progress, backlog and pictures of an iteration leave `version` alone.
  [test_fold: without_raising_the_guarding_version]
- A structural event raises `version` by one. [test_fold: raises_the_guarding_version_by_one]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from services.scheduler.state.components import (
    Absence,
    Component,
    Instance,
    Lead,
    Loaded,
    Target,
    Working,
    node_of_instance,
    role_of_instance,
)
from services.scheduler.state.course import (
    AcceptedEvaluation,
    Checkpoint,
    ComponentProgress,
    Evaluation,
    Iteration,
    Summary,
)
from services.scheduler.state.issued import Expectation
from services.scheduler.state.learned import Learned
from services.scheduler.state.manual_moves import ManualMoves
from services.scheduler.state.observed import Pictures
from services.scheduler.state.remembered import Remembered
from services.scheduler.state.values import JobSpec, Placed, Snapshot
from tidegate.ownership.records import GpuRecord, GpuState, Owner, PartKind, Transition
from tidegate.types import GpuId, Grant, InstanceId, JobId, NodeId, Role, Token, TransitionId


class Phase(StrEnum):
    """`stopping` gives all GPUs back, then the job ends as `ClusterState.outcome`."""

    SUBMITTED = "submitted"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})
OVER = TERMINAL | {Phase.STOPPING}
"""The job ends or has ended: nothing new begins."""


@dataclass(frozen=True, slots=True)
class SourceClock:
    """The events of one start of a source that were seen: all up to `through`, and those in `ahead`."""

    boot: int
    through: int = 0
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClusterState:
    """One job as its scheduler knows it. `ignored` counts refused events by reason."""

    job: JobId
    incarnation: int = 0
    version: int = 0
    applied_seq: int = 0
    phase: Phase = Phase.SUBMITTED
    outcome: Phase | None = None
    message: str = ""
    spec: JobSpec | None = None
    config_json: str = ""
    submission: str = ""
    """`<source>/<boot>/<sequence>` of the last submission; empty before the first."""
    gpus: Mapping[GpuId, GpuRecord] = field(default_factory=dict)
    transitions: Mapping[TransitionId, Transition] = field(default_factory=dict)
    num_transitions: int = 0
    targets: Mapping[TransitionId, Target] = field(default_factory=dict)
    """The targets of the open transitions and of the one that was planned last. A stop has none: it follows from no
    proposal."""
    components: Mapping[Role, Component] = field(default_factory=lambda: {role: Component() for role in Role})
    asked: Placed | None = None
    """Where a person asked for the actor, while it is not there yet."""
    asked_next: Placed | None = None
    """Where a person asked for it after the resize that is under way. The last request counts."""
    moved: Placed | None = None
    """Where a person had the actor moved; None while its home is where the config places it."""
    manual: ManualMoves = field(default_factory=ManualMoves)
    """What else persons asked for by hand."""
    instances: Mapping[InstanceId, Instance] = field(default_factory=dict)
    released: tuple[Grant, ...] = ()
    held: tuple[Grant, ...] = ()
    absent: Mapping[GpuId, Absence] = field(default_factory=dict)
    """GPUs that the policy places and that cannot be had; see `absences`."""
    snapshots: Mapping[int, Snapshot] = field(default_factory=dict)
    reference: Snapshot | None = None
    checkpoint: Checkpoint | None = None
    next_iteration: int = 0
    next_version: int = 0
    next_prompt: int = 0
    """The first prompt of the next iteration, by the actor's ledger."""
    iteration: Iteration | None = None
    summaries: tuple[Summary, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    evaluating: AcceptedEvaluation | None = None
    """The last evaluation that the rollout accepted, whether it is over or not."""
    num_restarts: int = 0
    expectations: Mapping[str, Expectation] = field(default_factory=dict)
    clocks: Mapping[str, SourceClock] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[Role, ComponentProgress] = field(default_factory=dict)
    backlog: Mapping[str, int] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=Remembered)
    ask_at_ms: int | None = None
    """When the policy is to be asked again, if nothing happens before."""
    seen: Pictures = field(default_factory=Pictures)
    learned: Learned = field(default_factory=Learned)

    def is_of_start_before(self, boot: int) -> bool:
        """Whether the last submission of the job is by a launcher with an earlier boot."""
        return bool(self.submission) and int(self.submission.split("/")[1]) < boot

    def with_component(self, role: Role, component: Component) -> ClusterState:
        return replace(self, components={**self.components, role: component})

    def stopping(self, outcome: Phase, message: str) -> ClusterState:
        """The job begins to end; nothing changes when it is ending already."""
        if self.phase in OVER:
            return self
        return replace(self, phase=Phase.STOPPING, outcome=outcome, message=message)

    def lead_of(self, role: Role) -> Lead | None:
        """The lead that can be asked now."""
        lead = self.components[role].lead
        instance = self.instances.get(lead.instance) if lead else None
        return lead if lead and instance and instance.living and instance.boot == lead.boot else None

    def holds(self, role: Role, version: int) -> bool:
        """Whether the component confirmed this version as published, with the reference policy where it needs one."""
        snapshot, at_work = self.snapshots.get(version), self.components[role].state
        if snapshot is None or not isinstance(at_work, Working):
            return False
        if at_work.loaded != Loaded(self.incarnation, version, snapshot.checksum):
            return False
        return at_work.has_reference or not self.needs_reference(role)

    def needs_reference(self, role: Role) -> bool:
        return role is Role.INFERENCE and self.spec is not None and self.spec.uses_reference

    def home(self, role: Role) -> Placed | None:
        """Where the component starts: where a person put it, else where the config places it; None before the job is
        submitted."""
        if role is Role.ACTOR and self.moved is not None:
            return self.moved
        if role in self.manual.homes:
            return self.manual.homes[role]
        return self.spec.placement[role] if self.spec else None

    def owner(self, role: Role) -> Owner:
        return Owner(self.job, role)

    def records_of(self, role: Role) -> tuple[GpuRecord, ...]:
        """The component's GPUs in the store, owned and lost, by id. A lost GPU whose last owner the store does not know
        counts for the component whose slot it is: that one needs it and asks its gate."""
        own = self.owned_by(role)
        placed = self.spec.slots(role) if self.spec else ()
        lost = [each for each in self.owned_by(None) if each.state is GpuState.LOST and each.gpu in placed]
        return tuple(sorted((*own, *lost), key=lambda record: record.gpu)) if lost else own

    def owned_by(self, role: Role | None) -> tuple[GpuRecord, ...]:
        """The component's GPUs by id; None: those without an owner."""
        return self._records.get(self.owner(role) if role else None, ())

    @cached_property
    def _records(self) -> Mapping[Owner | None, tuple[GpuRecord, ...]]:
        """By owner, by id. Kept, because a decision asks for every role several times, with a thousand GPUs."""
        found: dict[Owner | None, list[GpuRecord]] = {}
        owner: Owner | None = None
        own = found.setdefault(owner, [])
        for _, record in sorted(self.gpus.items()):
            if record.owner is not owner:
                # Neighbours share an owner: looking each up would hash it a thousand times.
                owner = record.owner
                own = found.setdefault(owner, [])
            own.append(record)
        return {owner: tuple(records) for owner, records in found.items()}

    def transition_of(self, role: Role) -> Transition | None:
        """The open transition that has a part for the role. At most one has."""
        for _, transition in sorted(self.transitions.items()):
            if any(part.role is role for part in transition.parts):
                return transition
        return None

    def changing(self, role: Role) -> Transition | None:
        """The open transition of a component that works now and goes on afterwards (`PartKind.is_change`)."""
        transition = self.transition_of(role)
        return transition if transition is not None and transition.part(role).kind.is_change else None

    def resize(self) -> Transition | None:
        """The open resize of the actor."""
        transition = self.transition_of(Role.ACTOR)
        is_resize = transition is not None and transition.part(Role.ACTOR).kind is PartKind.RESIZE
        return transition if is_resize else None

    def moving(self, role: Role, transition: Transition) -> tuple[tuple[Grant, ...], tuple[Grant, ...]]:
        """The grants that leave the role, and those that come to it, in the transition's order."""
        owner = self.owner(role)
        leaving = tuple(Grant(move.gpu, move.token) for move in transition.moves if move.source == owner)
        coming = tuple(Grant(move.gpu, move.token) for move in transition.moves if move.target == owner)
        return leaving, coming

    def suspects(self, role: Role) -> tuple[Grant, ...]:
        """Grants that the store still counts as the role's and that no worker is known to hold. Their gates are asked.

        Grants that are being acquired are left out: their holder has not reported yet.
        """
        token_of = {grant.gpu: grant.token for grant in self.components[role].grants}
        transition, owner = self.transition_of(role), self.owner(role)
        coming = {move.gpu for move in transition.moves if move.target == owner} if transition else set()
        strangers = [record for record in self.records_of(role) if token_of.get(record.gpu) != record.token]
        return tuple(Grant(record.gpu, record.token) for record in strangers if record.gpu not in coming)

    def lost_term(self, term: int, *, records: Mapping[GpuId, GpuRecord] | None = None) -> int:
        """The largest term of a token that the store has lost: it passed a gate of the job's GPUs, and a store under
        `term` with these records cannot have granted it. 0 without such a token. `records`: by default those that were
        read last."""
        records, own = self.gpus if records is None else records, frozenset(self.spec.gpus if self.spec else ())
        passed = (grant for instance in self.instances.values() for grant in instance.gates if grant.gpu in own)
        first = Token(term, 0)
        lost = [
            grant.token.term
            for grant in passed
            if grant.token > max(first, records[grant.gpu].token if grant.gpu in records else first)
        ]
        return max(lost, default=0)

    def living(self, *, role: Role | None = None, node: NodeId | None = None) -> tuple[InstanceId, ...]:
        """Instances that can be asked, by name: of this role and on this node, where they are given."""
        found = (
            name
            for name, instance in self.instances.items()
            if instance.living
            and instance.endpoint
            and (role is None or role_of_instance(name) is role)
            and (node is None or node_of_instance(name) == node)
        )
        return tuple(sorted(found))

    @property
    def target_version(self) -> int:
        """The version that rollout and inference must hold now: the open iteration's until its accounts are in."""
        if self.iteration is not None and not self.iteration.is_accounted:
            return self.iteration.plan.version
        return self.next_version

    @property
    def final_checksum(self) -> str:
        """The checksum of the unsharded weights after the last iteration; empty until they are published."""
        if self.spec is None or self.next_iteration < self.spec.num_iterations:
            return ""
        snapshot = self.snapshots.get(self.next_version)
        return snapshot.weights_checksum if snapshot else ""
