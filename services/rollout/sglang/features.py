"""What an SGLang can do, by the version that it tells. Pure.

Its endpoints change between versions: one that is older than what this adapter needs is refused before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from services.rollout.engine import EngineFailed

OLDEST = Version("0.5.23")
"""The first that this adapter was run with: it has sessions around weight updates, the versions of each token, and
/v1/loads. Some of them are younger than 0.5.20."""


@dataclass(frozen=True, slots=True)
class SglangFeatures:
    """`repeats_draws`: it runs in its deterministic mode, where a request's seed counts."""

    version: str
    repeats_draws: bool


def features_of(server_info: Mapping[str, Any]) -> SglangFeatures:
    """From the answer of /server_info. EngineFailed when the version is unknown or too old."""
    told = str(server_info.get("version"))
    check_version(told)
    return SglangFeatures(told, repeats_draws=bool(server_info.get("enable_deterministic_inference")))


def check_version(told: str) -> None:
    """EngineFailed unless an SGLang of this version can be driven."""
    try:
        version = Version(told)
    except InvalidVersion as error:
        raise EngineFailed(f"SGLang tells its version as {told!r}, which is none: install sglang=={OLDEST}") from error
    if version < OLDEST:
        raise EngineFailed(f"SGLang {told} is older than {OLDEST}, whose API this needs: install sglang=={OLDEST}")
