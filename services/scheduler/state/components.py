"""The components of a job as the scheduler knows them: the services of each, its lead, and whether it works.

A component is `Down`, `Working` or `Suspended`. Each case has the fields that only that case needs.

Invariants:
- A component that works has a GPU. [test_components: works_without_a_gpu]
- A component has a layout exactly while it has GPUs. [test_components: a_layout_exactly_while]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from services.scheduler.state.values import Placed
from tidegate.types import Grant, InstanceId, Layout, NodeId, Role, Token, TransitionId


@dataclass(frozen=True, slots=True)
class Instance:
    """A running service of a role on a node. `living` is False from its lost lease on, until it joins again.
    `gates`: the highest token that had passed the gate of each GPU of its node when it joined."""

    endpoint: str
    boot: int
    living: bool
    gates: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Lead:
    """The start `boot` of the instance won the election. A later start leads only after an election of its own."""

    instance: InstanceId
    endpoint: str
    epoch: int
    boot: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights that a component confirmed under its present lead."""

    incarnation: int
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Down:
    """The component has no GPUs and has kept nothing."""

    CASE: ClassVar[str] = "down"


@dataclass(frozen=True, slots=True)
class Working:
    """The component has GPUs and a layout. ValueError without a GPU.

    - `grants`: of the members that are not known to be dead, in rank order;
    - `placed`: where the layout came into force, with the ranks that died since;
    - `dead_members`: an actor's members, present or to come, that died in the open change;
    - `num_deaths`: deaths of ranks that an actor outlived since the iteration opened.

    An actor that lacks ranks keeps its state and waits for them.
    """

    CASE: ClassVar[str] = "working"

    grants: tuple[Grant, ...]
    placed: Placed
    loaded: Loaded | None = None
    has_reference: bool = False
    dead_members: tuple[Grant, ...] = ()
    num_deaths: int = 0

    def __post_init__(self) -> None:
        if not self.grants:
            raise ValueError(f"a component works in layout {self.placed.layout} without a GPU: without one it is down")


@dataclass(frozen=True, slots=True)
class Suspended:
    """The component was to have no GPUs for now. An actor's state is in host memory of the nodes in `placed`.

    `placed` is None where the component was down before it was suspended. `num_deaths` is as in `Working`.
    """

    CASE: ClassVar[str] = "suspended"

    placed: Placed | None = None
    num_deaths: int = 0


@dataclass(frozen=True, slots=True)
class Component:
    """A component of the job.

    - `broken`: open transitions that cannot succeed any more;
    - `switched`: the transition whose layout is in force, or which suspended the component, as its lead says;
    - `num_failed_starts`: moves of it that failed in a row;
    - `num_failed_releases`: those among them that only gave GPUs back;
    - `last_failure`: why the last of those moves failed.
    """

    lead: Lead | None = None
    state: Down | Working | Suspended = Down()
    broken: tuple[TransitionId, ...] = ()
    switched: TransitionId | None = None
    num_failed_starts: int = 0
    num_failed_releases: int = 0
    last_failure: str = ""

    @property
    def grants(self) -> tuple[Grant, ...]:
        return self.state.grants if isinstance(self.state, Working) else ()

    @property
    def layout(self) -> Layout | None:
        return self.state.placed.layout if isinstance(self.state, Working) else None

    @property
    def is_up(self) -> bool:
        return isinstance(self.state, Working)

    @property
    def is_suspended(self) -> bool:
        return isinstance(self.state, Suspended)

    @property
    def lacks_ranks(self) -> bool:
        return self.layout is not None and len(self.grants) < self.layout.num_ranks

    @property
    def dead_members(self) -> tuple[Grant, ...]:
        return self.state.dead_members if isinstance(self.state, Working) else ()

    def with_grants(self, left: tuple[Grant, ...]) -> Component:
        """The component with only these of its grants. With none left, it is down."""
        if left and isinstance(self.state, Working):
            return replace(self, state=replace(self.state, grants=left))
        return replace(self, state=Down())


@dataclass(frozen=True, slots=True)
class Absence:
    """A GPU that cannot be had, under the token that it has in the store.

    `since_ms` is by the store's clock; None counts from the next decision on. `is_anew`: an instance has joined on its
    node since the GPU was first found absent.
    """

    token: Token
    since_ms: int | None
    is_long: bool = False
    is_anew: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """Where a transition is to bring its component; None: to no GPUs. `is_asked`: a person asked for it. `split`: where
    that person wants each component once the transition is in force; empty where they asked for the actor alone."""

    placed: Placed | None
    is_asked: bool = False
    split: Mapping[Role, Placed] = field(default_factory=dict)


_ROLES = {str(role): role for role in Role}


def node_of_instance(instance: InstanceId) -> NodeId:
    return NodeId(instance.partition("@")[2])


def role_of_instance(source: str) -> Role | None:
    """None when the source is no component's instance ("scheduler", "launcher")."""
    role, at, node = source.partition("@")
    return _ROLES.get(role) if at and node else None
