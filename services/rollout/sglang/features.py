"""An SGLang's features, from the version that it reports. A version that this adapter cannot drive is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import EngineFailed
from tidegate.huggingface.sglang_support import check_version


@dataclass(frozen=True, slots=True)
class SglangFeatures:
    """`repeats_draws`: whether it runs in its deterministic mode, in which a request's seed decides its draws."""

    version: str
    repeats_draws: bool


def features_of(server_info: Mapping[str, Any]) -> SglangFeatures:
    """The features, from the answer of /server_info. Raises EngineFailed when the version is unknown or too old."""
    version = str(server_info.get("version"))
    try:
        check_version(version)
    except ValueError as error:
        raise EngineFailed(str(error)) from error
    return SglangFeatures(version, repeats_draws=bool(server_info.get("enable_deterministic_inference")))
