"""Components of a job as the scheduler knows them: the services of each, who leads it, what it runs on and holds."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.state.values import Placed
from tidegate.types import Grant, InstanceId, Layout, NodeId, Role, Token, TransitionId


@dataclass(frozen=True, slots=True)
class Instance:
    """A running service of a role on a node. `living` is False from its lost lease on, until it joins again."""

    endpoint: str
    boot: int
    living: bool


@dataclass(frozen=True, slots=True)
class Lead:
    """Elected by the start `boot` of its instance; a later start of it leads only after its own election."""

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
class Component:
    """`layout` is None while the component is down; `placed` is where the layout came into force, with who died since.
    `broken` names transitions that cannot succeed any more, `switched` the one whose layout is in force by the lead's
    word; `last_failure` says of the last of its moves that failed in a row what broke it.

    An actor that is up and lacks ranks keeps its state and waits for them; `gone` are those of its members, and of
    those to come, who died in the open change, `num_deaths` counts what it outlived since the iteration opened. Who
    `is_suspended` was to have no GPUs: an actor's state is in the memory of the nodes where it was `placed`."""

    lead: Lead | None = None
    grants: tuple[Grant, ...] = ()
    layout: Layout | None = None
    loaded: Loaded | None = None
    has_reference: bool = False
    broken: tuple[TransitionId, ...] = ()
    num_failed_starts: int = 0
    last_failure: str = ""
    switched: TransitionId | None = None
    gone: tuple[Grant, ...] = ()
    num_deaths: int = 0
    placed: Placed | None = None
    is_suspended: bool = False

    @property
    def is_up(self) -> bool:
        return self.layout is not None

    @property
    def lacks_ranks(self) -> bool:
        return self.layout is not None and len(self.grants) < self.layout.num_ranks


@dataclass(frozen=True, slots=True)
class Absence:
    """Of a GPU that cannot be had, under the token that it has in the store; `since_ms` by the store's clock, None:
    from the next decision on. `is_anew`: an instance has joined on its node since it was first found so."""

    token: Token
    since_ms: int | None
    is_long: bool = False
    is_anew: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """Where a transition brings its role, as it was planned; None: to no GPUs. `is_asked`: a person wanted it."""

    placed: Placed | None
    is_asked: bool = False


_ROLES = {str(role): role for role in Role}


def node_of_instance(instance: InstanceId) -> NodeId:
    return NodeId(instance.partition("@")[2])


def role_of_instance(source: str) -> Role | None:
    """None when the source is no component's instance ("scheduler", "launcher")."""
    role, at, node = source.partition("@")
    return _ROLES.get(role) if at and node else None
