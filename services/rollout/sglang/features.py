"""What an SGLang can do, by the version that it tells; one that this adapter cannot drive is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import EngineFailed
from tidegate.huggingface.served import check_version


@dataclass(frozen=True, slots=True)
class SglangFeatures:
    """`repeats_draws`: it runs in its deterministic mode, where a request's seed counts."""

    version: str
    repeats_draws: bool


def features_of(server_info: Mapping[str, Any]) -> SglangFeatures:
    """From the answer of /server_info. EngineFailed when the version is unknown or too old."""
    told = str(server_info.get("version"))
    try:
        check_version(told)
    except ValueError as error:
        raise EngineFailed(str(error)) from error
    return SglangFeatures(told, repeats_draws=bool(server_info.get("enable_deterministic_inference")))
