"""An SGLang's features, from the version that it reports. A version that this adapter cannot drive is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.rollout.engine import EngineFailed
from tidegate.huggingface.sglang_support import check_version


class Rest(StrEnum):
    """What happens to a server while its engine sleeps.

    released: it stays up, and its memory saver gives back weights, KV cache and CUDA graphs.
    kept: it stays up with all its memory. On a CPU nothing releases it, and nobody else needs it: a standby's budget
    limits it.
    ended: it ends, because the device's memory is another component's and the server cannot give it back.
    """

    RELEASED = "released"
    KEPT = "kept"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SglangFeatures:
    """`repeats_draws`: whether it runs in its deterministic mode, in which a request's seed decides its draws."""

    version: str
    repeats_draws: bool
    saves_memory: bool = False
    """Whether it runs with its memory saver, which exists on CUDA alone."""

    def rest(self, device: str) -> Rest:
        if self.saves_memory:
            return Rest.RELEASED
        return Rest.KEPT if device == "cpu" else Rest.ENDED


def features_of(server_info: Mapping[str, Any]) -> SglangFeatures:
    """The features, from the answer of /server_info. Raises EngineFailed when the version is unknown or too old."""
    version = str(server_info.get("version"))
    try:
        check_version(version)
    except ValueError as error:
        raise EngineFailed(str(error)) from error
    return SglangFeatures(
        version,
        repeats_draws=bool(server_info.get("enable_deterministic_inference")),
        saves_memory=bool(server_info.get("enable_memory_saver")),
    )
