"""What persons asked for by hand and what of it is in force: frozen values.

The actor's part of a split is in `ClusterState.asked`, `asked_next` and `moved`, as for a resize of the actor alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.state.values import Placed
from tidegate.types import GpuId, Role


@dataclass(frozen=True, slots=True)
class ManualMoves:
    """
    - `split`: where a person wants each of the three components, while the actor is not there yet; else empty.
    - `homes`: where a person put the rollout and the inference, also where that is their place in the config. Without
      a split in force it is empty, and they are at home where the config places them.
    - `held`: the (incarnation, iteration) in which the last split came into force. Until that iteration ends, no policy
      changes it.
    - `drained`: GPUs that a person took away from the job, sorted. No component gets them.
    """

    split: Mapping[Role, Placed] = field(default_factory=dict)
    homes: Mapping[Role, Placed] = field(default_factory=dict)
    held: tuple[int, int] | None = None
    drained: tuple[GpuId, ...] = ()
