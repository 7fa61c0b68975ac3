"""The header of a command to the actor's lead, with every field set."""

from __future__ import annotations

from services.scheduler.state import commands as cmd
from tidegate.types import CommandId, GpuId, Grant, InstanceId, JobId, Role, Token

FIRST, SECOND = Grant(GpuId("n0/0"), Token(2, 5)), Grant(GpuId("n1/0"), Token(2, 6))
HEADER = cmd.Header(
    id=CommandId("bench/t1/up/actor/e3"),
    job=JobId("bench"),
    incarnation=4,
    role=Role.ACTOR,
    endpoint="127.0.0.1:1",
    lead_epoch=3,
    deadline_ms=1_234_567,
    instances=(cmd.Address(InstanceId("actor@n0"), "127.0.0.1:1", 9),),
    members=(FIRST, SECOND),
    transition_id="t1",
)
