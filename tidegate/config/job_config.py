"""Values -> a checked `JobConfig`. `tidegate.config.files` reads the values from files.

Order of the checks:
1. Keys: an unknown key is refused with the nearest known key.
2. Types and ranges.
3. Relations between sections: GPUs exist and are named once, layouts fit their GPUs, minibatches divide into groups.
A step reports all its faults at once. The next step runs only when the step before found no fault.

Then the costs that the config leaves out are set to those of `cluster.pace`, if it has one.

Invariants:
- A `JobConfig` is valid when made and never changes. [test_wrong_configs: a_wrong_config_is_refused]
- `to_json` and `from_json` are exact inverses, so that every process of a job reads the same config.
  [test_config: json_and_back]
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError, model_validator

from tidegate.config.checks.actor_layouts import actor_layout_faults
from tidegate.config.checks.data import data_faults
from tidegate.config.checks.evaluation import evaluation_faults
from tidegate.config.checks.faults import fault_line
from tidegate.config.checks.job import (
    address_faults,
    algorithm_faults,
    config_warnings,
    job_faults,
    machine_faults,
    microbatch_faults,
    model_faults,
    placement_faults,
    replica_faults,
    rollout_faults,
)
from tidegate.config.checks.lr import lr_faults
from tidegate.config.checks.pace import pace_faults
from tidegate.config.reading.layers import EMPTY_LAYER, Layer
from tidegate.config.reading.origins import with_origin, with_origins
from tidegate.config.sections.job import JobSections
from tidegate.json_text import parse_json
from tidegate.pace.costs import with_paced_costs


class ConfigError(ValueError):
    """The config cannot be run. The message lists the faults of the first step that found any, one a line."""


class JobConfig(JobSections):
    @model_validator(mode="after")
    def _sections_fit(self) -> JobConfig:
        faults = [
            *job_faults(self),
            *address_faults(self),
            *machine_faults(self),
            *model_faults(self),
            *data_faults(self),
        ]
        faults += [*placement_faults(self), *rollout_faults(self), *algorithm_faults(self), *evaluation_faults(self)]
        faults += [*microbatch_faults(self), *pace_faults(self)]
        # These compute with minibatches that divide, so they run only on a config without other faults.
        faults += [] if faults else [*replica_faults(self), *actor_layout_faults(self), *lr_faults(self)]
        if faults:
            raise ConfigError("\n".join(faults))
        return self

    def warnings(self) -> tuple[str, ...]:
        """Settings that are legal but rarely intended, one a line, for the person who starts the job."""
        return config_warnings(self)

    def to_json(self) -> str:
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> JobConfig:
        """ConfigError: the text is not a valid config."""
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"config is not JSON: {error}") from error
        return parse_config(raw)

    @classmethod
    def read(cls, path: Path) -> JobConfig:
        """The config that `to_json` wrote to this file. OSError; ConfigError names the file."""
        try:
            return cls.from_json(path.read_text())
        except (ConfigError, UnicodeDecodeError) as error:
            lines = "; ".join(str(error).splitlines())
            raise ConfigError(f"{path} is damaged, or of another release ({lines}): put it back from a copy") from error


def parse_config(raw: object, *, layer: Layer = EMPTY_LAYER) -> JobConfig:
    """A mapping from YAML or JSON -> JobConfig. `layer` has the origin of each value.

    ConfigError lists every wrong key, type and range. If there is none, it lists every fault between the sections.
    """
    try:
        return _with_paced_costs(JobConfig.model_validate(raw))
    except ValidationError as error:
        faults = [(fault_line(JobConfig, fault), fault["loc"]) for fault in error.errors()]
        lines = [with_origin(text, layer, at) if at else with_origins(text, layer) for text, at in faults]
        raise ConfigError("\n".join(lines)) from error


def _with_paced_costs(config: JobConfig) -> JobConfig:
    if config.cluster.pace is None:
        return config
    num_policies = 1 + (config.algorithm.kl_coefficient > 0)
    costs = with_paced_costs(config.assumptions.costs, config.cluster.pace, num_policies=num_policies)
    return config.model_copy(update={"assumptions": config.assumptions.model_copy(update={"costs": costs})})
