"""The words that every part of Tidegate shares: ids, roles, layouts, tokens. Pure values, no I/O.

Every id is derived from the thing that it names and is never random, so that a replayed history names the same things.

Invariants:
- A `Token` is totally ordered by (term, counter). [test_types: tokens_are_ordered_by_term_first]
- A `Layout` is valid when made. [test_types: layout_that_megatron_cannot_run]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
GpuId = NewType("GpuId", str)
"""`<node>/<index>`: one device slot, which may be a part of a device; on a CPU node a process."""
InstanceId = NewType("InstanceId", str)
"""`<role>@<node>`: one running service of a role on a node."""
TransitionId = NewType("TransitionId", str)
CommandId = NewType("CommandId", str)

LOOPBACK = "127.0.0.1"
"""The address of what no other machine has to reach."""

_COUNT = re.compile(r"0|[1-9][0-9]{0,18}")
"""One text for each number: no zeros before it, and no digits but those of ASCII."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")


class Role(StrEnum):
    """A component of a job."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    INFERENCE = "inference"


class Drain(StrEnum):
    """What the jobs of a drained node do. It gets no others."""

    LEAVE = "leave"
    """They are interrupted, and go on elsewhere."""
    STAY = "stay"
    """They stay until they end."""


class MinibatchOrder(StrEnum):
    """How complete groups are put into minibatches."""

    FIXED = "fixed"
    ARRIVAL = "arrival"


class PromptOrder(StrEnum):
    """The order in which prompts go to engines when an iteration opens, by their hints."""

    AS_GIVEN = "as_given"
    LONGEST_FIRST = "longest_first"
    SHORT_BETWEEN_LONG = "short_between_long"
    """The longest first, with one of the shortest quarter before each of them."""


class Precision(StrEnum):
    """The precision of weights and arithmetic in training.

    Main parameters, the sums of gradients and the moments are fp32 in either.
    """

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return {Precision.FP32: 4, Precision.BF16: 2}[self]


class Recompute(StrEnum):
    """Which activations the backward pass computes again instead of storing them. The names are megatron-core's."""

    NONE = "none"
    SELECTIVE = "selective"
    """The activations inside attention, which grow with the square of a sequence's length."""
    FULL = "full"
    """All activations but the input of each layer."""


@dataclass(frozen=True, order=True, slots=True)
class Token:
    """A fencing token. The holder of the larger token is the later owner, across store failovers too."""

    term: int
    counter: int

    def __str__(self) -> str:
        return f"{self.term}.{self.counter}"


LARGEST_TERM = 10**12 - 1
"""No text, record or message is read that has a larger term or counter. Boots and epochs are a million times the term
(`cell_store.COUNTS_PER_TERM`), and the store's numbers have 18 digits. A counter has the same limit, for one rule."""


NO_TOKEN = Token(0, 0)
"""Smaller than any token that a store grants."""


@dataclass(frozen=True, order=True, slots=True)
class Grant:
    """A GPU and the token under which its holder may use it."""

    gpu: GpuId
    token: Token

    @property
    def stands_by(self) -> bool:
        """Whether the grant names a standby: a process on the GPU's slot that may not use the GPU."""
        return self.token == NO_TOKEN


@dataclass(frozen=True, slots=True)
class Layout:
    """A Megatron layout of tp * pp * dp * cp ranks. ep divides dp * cp. A pipeline stage has vpp chunks of layers."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "cp", "ep", "vpp"):
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"layout {axis}={size}: every axis is at least 1; set {axis} to 1 to leave it out")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"layout vpp={self.vpp} with pp=1: Megatron interleaves stages only; set vpp to 1 or pp > 1"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        axes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "vpp": self.vpp}
        return "-".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "single"


@dataclass(frozen=True, order=True, slots=True)
class SampleId:
    """One sampled response: response `draw` to prompt `prompt` of an iteration, in one incarnation of the job."""

    incarnation: int
    iteration: int
    prompt: int
    draw: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.iteration}.{self.prompt}.{self.draw}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Reads the text that `str` makes. ValueError for any other text."""
        fields = text.split(".")
        if len(fields) != 4 or not all(map(_COUNT.fullmatch, fields)):
            raise ValueError(f"sample id {text[:60]!r} is not <incarnation>.<iteration>.<prompt>.<draw>")
        return cls(*map(int, fields))


def job_id(name: str) -> JobId:
    """Makes an id of a job's name. The name stands in names of streams, so only 1-48 of a-z, 0-9 and inner dashes pass.

    ValueError for any other name.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"job name {name!r} must be 1-48 characters of a-z, 0-9 and '-', not starting or ending in '-'"
        )
    return JobId(name)


def gpu_id(node: NodeId, index: int) -> GpuId:
    return GpuId(f"{node}/{index}")


def node_of(gpu: GpuId) -> NodeId:
    return NodeId(gpu.rsplit("/", 1)[0])


def gpu_index(gpu: GpuId) -> int:
    """The slot's number on its node. `device_slots` says which device that is."""
    return int(gpu.rsplit("/", 1)[1])


def instance_id(role: Role, node: NodeId) -> InstanceId:
    return InstanceId(f"{role}@{node}")
