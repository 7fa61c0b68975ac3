"""The parts of a fake cluster, and the job that runs on it: placement, instances, gates, leads, hashes of samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from services.scheduler.state import commands as cmd
from services.scheduler.state.values import IterationPlan, JobSpec, Placed
from simulator.changes import Change
from tidegate.types import GpuId, Grant, InstanceId, JobId, Layout, NodeId, Role, Token, gpu_id

JOB = JobId("tide")
NODES = (NodeId("n0"), NodeId("n1"))


def gpu(node: str, index: int) -> GpuId:
    return gpu_id(NodeId(node), index)


def spec(
    *,
    num_iterations: int = 2,
    uses_reference: bool = True,
    max_actor_restarts: int = 3,
    deadline_ms: int = 1000,
    standby: tuple[GpuId, ...] = (),
    max_extra_prompts: int = 0,
    evaluate_every: int | None = None,
) -> JobSpec:
    return JobSpec(
        placement={
            Role.ACTOR: Placed((gpu("n0", 0), gpu("n1", 0)), Layout(dp=2)),
            Role.ROLLOUT: Placed((gpu("n0", 1), gpu("n1", 1), gpu("n1", 3)), Layout(dp=3)),
            Role.INFERENCE: Placed((gpu("n0", 2), gpu("n1", 2)), Layout(tp=2)),
        },
        num_iterations=num_iterations,
        num_prompts=4,
        group_size=2,
        num_minibatches=2,
        seed=7,
        uses_reference=uses_reference,
        max_actor_restarts=max_actor_restarts,
        command_deadline_ms=deadline_ms,
        standby=standby,
        max_extra_prompts=max_extra_prompts,
        evaluate_every=evaluate_every,
    )


def on_either_node(**settings: int) -> JobSpec:
    """A job each of whose components has whole copies on n0 alone."""
    made = spec(max_actor_restarts=99, **settings)  # type: ignore[arg-type]  # only numbers are varied here
    inference = Placed((gpu("n0", 2), gpu("n1", 2)), Layout(dp=2))
    return replace(made, placement={**made.placement, Role.INFERENCE: inference})


def role_of(name: InstanceId) -> Role:
    return Role(name.partition("@")[0])


def num_prompts(plan: IterationPlan) -> int:
    """The prompts that an iteration takes: one more in each later iteration, while there are extra ones."""
    return plan.num_prompts + min(plan.iteration, plan.max_extra_prompts)


def samples(plan: IterationPlan, incarnation: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Hashes of the ids of the samples that are trained, filtered and discarded."""
    count = num_prompts(plan) * plan.group_size
    ids = [hash_of(incarnation, plan.iteration, index) for index in range(count)]
    return tuple(ids[: count - 3]), tuple(ids[count - 3 : count - 1]), tuple(ids[count - 1 :])


def hash_of(*numbers: int) -> int:
    value = 1469598103934665603
    for number in numbers:
        value = (value ^ (number + 1)) * 1099511628211 % 2**64
    return value


@dataclass
class FakeInstance:
    is_alive: bool = True
    has_lease: bool = True


@dataclass
class FakeGate:
    highest: Token = field(default_factory=lambda: Token(0, 0))
    is_held: bool = False
    holder: Role | None = None
    """The component of the worker that passed last. None where a test made the gate."""


@dataclass
class FakeLead:
    """The memory of one lead, which is lost with it. `members` are the grants that its component has.

    The rules are those of `tidegate.runtime.lead`:
    - A newer incarnation ends the iteration.
    - A failed iteration goes on when weights were loaded, or when it is opened again.
    - The lead of an actor closes an iteration once all its ranks are at work.
    """

    instance: InstanceId
    epoch: int
    members: tuple[Grant, ...] = ()
    plan: IterationPlan | None = None
    broken_off: IterationPlan | cmd.Evaluate | None = None
    evaluated: cmd.Evaluate | None = None
    """The evaluation under way."""
    incarnation: int = 0
    has_reported: bool = False
    eighths: int = 0
    """So much of the iteration its last picture showed."""
    resize: Change | None = None
    suspension: cmd.Suspend | None = None
    """The suspension that comes between two updates."""
    kept_on: frozenset[NodeId] | None = None
    """The nodes whose memory holds the state of a suspended actor; empty once one of them is lost."""
    versions: dict[Grant, int] = field(default_factory=dict)
    """The version that each member has loaded."""
    closing: IterationPlan | None = None
    """The iteration that the lead has to save and publish."""
    is_held: bool = False
    group_order: tuple[int, ...] = ()

    def meet(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            self.incarnation, self.plan, self.broken_off, self.resize = incarnation, None, None, None
            self.closing = self.evaluated = self.suspension = None
            self.kept_on = None

    def open(self, plan: IterationPlan) -> None:
        if plan is not self.broken_off:
            self.is_held, self.group_order = False, ()
        self.plan, self.broken_off, self.evaluated = plan, None, None
        self.has_reported, self.eighths = False, 0

    def evaluate(self, command: cmd.Evaluate) -> None:
        self.evaluated, self.broken_off = command, None
