"""What the agent of a machine that lends its nodes leaves for the program that takes its place.

Invariant: another shape of it is another form. [test_handed: of_another_shape]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidegate.runtime.cuda import CudaDevice
from tidegate.runtime.processes import ServiceEnd, Watched


@dataclass(frozen=True, slots=True)
class Kept:
    """A process for the next program: its place is the job's folder in host memory and a name."""

    memory: Path
    service: Watched | None
    ends: tuple[ServiceEnd, ...]
    """Where it has ended, and nobody was told."""
    name: str
    pid: int

    def to_json(self) -> dict[str, Any]:
        service = None if self.service is None else self.service.to_json()
        return {**asdict(self), "memory": str(self.memory), "service": service}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Kept:
        service = None if fields["service"] is None else Watched.of(fields["service"])
        ends = tuple(ServiceEnd(**each) for each in fields["ends"])
        return cls(**{**fields, "memory": Path(fields["memory"]), "service": service, "ends": ends})


@dataclass(frozen=True, slots=True)
class MachineLeft:
    """What an agent leaves for its next program: processes, until when they are kept (by the monotonic clock), the
    credentials that they have (as `JobMemories` has them), and the devices that it lends."""

    processes: tuple[Kept, ...] = ()
    kept_until_s: float = 0.0
    credentials: Mapping[Path, str] = field(default_factory=dict)
    devices: tuple[CudaDevice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "processes": [each.to_json() for each in self.processes],
            "kept_until_s": self.kept_until_s,
            "credentials": {str(folder): digest for folder, digest in self.credentials.items()},
            "devices": [asdict(each) for each in self.devices],
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> MachineLeft:
        return cls(
            tuple(map(Kept.of, fields["processes"])),
            fields["kept_until_s"],
            {Path(folder): digest for folder, digest in fields["credentials"].items()},
            tuple(CudaDevice(**each) for each in fields["devices"]),
        )
