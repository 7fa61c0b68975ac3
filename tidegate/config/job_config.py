"""What a job may be told, and values -> a checked `JobConfig`: what can be known wrong of them is refused here.

Order: keys (an unknown one names the nearest known), types and ranges, then what must hold between sections: GPUs exist
and are named once, layouts fit their GPUs, minibatches divide into groups. Every fault of one such step is told at
once; the next step looks only at what the one before found right. `tidegate.config.files` reads the values from files.
Invariants: a `JobConfig` is valid when made and never changes; `to_json` and `from_json` are exact inverses, so that
every process of a job reads the same config.
"""

from __future__ import annotations

import json

from pydantic import ValidationError, model_validator

from tidegate.config.checks.data import data_faults
from tidegate.config.checks.evaluation import evaluation_faults
from tidegate.config.checks.faults import described
from tidegate.config.checks.job import (
    algorithm_faults,
    config_warnings,
    job_faults,
    microbatch_faults,
    model_faults,
    placement_faults,
    rollout_faults,
)
from tidegate.config.checks.lr import lr_faults
from tidegate.config.reading.layers import NOTHING, Layer
from tidegate.config.reading.origins import with_origin, with_origins
from tidegate.config.sections.job import JobSections


class ConfigError(ValueError):
    """The config cannot be run; the message lists the faults of the first step that found any, one a line."""


class JobConfig(JobSections):
    """All of a job."""

    @model_validator(mode="after")
    def _sections_fit(self) -> JobConfig:
        faults = [*job_faults(self), *model_faults(self), *data_faults(self)]
        faults += [*placement_faults(self), *rollout_faults(self), *algorithm_faults(self), *evaluation_faults(self)]
        faults += microbatch_faults(self)
        # Its numbers are those of a job whose minibatches divide.
        faults += [] if faults else lr_faults(self)
        if faults:
            raise ConfigError("\n".join(faults))
        return self

    def warnings(self) -> tuple[str, ...]:
        """What is allowed and seldom meant, for whoever starts the job."""
        return config_warnings(self)

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> JobConfig:
        """ConfigError when the text is not a valid config."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"config is not JSON: {error}") from error
        return parse_config(raw)


def parse_config(raw: object, *, given: Layer = NOTHING) -> JobConfig:
    """A mapping as read from YAML or JSON -> JobConfig.

    ConfigError lists every wrong key, type and range; once there is none, every fault between the sections. `given`
    knows where each value was given.
    """
    try:
        return JobConfig.model_validate(raw)
    except ValidationError as error:
        faults = [(described(JobConfig, fault), fault["loc"]) for fault in error.errors()]
        told = [with_origin(text, given, at) if at else with_origins(text, given) for text, at in faults]
        raise ConfigError("\n".join(told)) from error
