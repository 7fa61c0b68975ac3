"""A scenario file and overrides -> a checked `Scenario` that knows the origin of each value.

Order of the checks:
1. Keys, types and ranges.
2. Relations between sections.
3. What the physics can run: the memory of each layout and engine.
4. The lengths file.
The first step with faults reports all of them, one a line, with the file and line or the override of the value. Nothing
runs before all checks pass.

Invariant: a `Scenario` is valid when made and never changes. [test_scenario: a_wrong_scenario_is_refused]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import yaml
from pydantic import ValidationError, model_validator

from simulator.cost_model import CostLaws
from simulator.curves import BadCurve
from simulator.drift import Drift, drift_of
from simulator.faults import EngineFault, Fault, GpuFault, LateFault, NodeFault
from simulator.lengths import BadTrace, LengthLaw, Lengths, draw_lengths, lengths_of_trace, parse_trace
from simulator.noise import Noise
from simulator.scenario_checks import gpus_of, scenario_faults
from simulator.scenario_physics import computed_laws, expected_work, home_layout, physics_faults
from simulator.scenario_sections import FaultSection, ScenarioSections
from simulator.workload import Workload
from simulator.world import Placement, World
from tidegate.config.base import FileName, fields_of
from tidegate.config.checks.faults import fault_line
from tidegate.config.job_config import ConfigError
from tidegate.config.reading.layers import (
    EMPTY_LAYER,
    Layer,
    Origin,
    apply_override,
    dotted,
    merge_layers,
    parse_override,
    with_absolute_paths,
)
from tidegate.config.reading.origins import with_origin, with_origins
from tidegate.config.reading.yaml_text import AmbiguousYaml, read_yaml, yaml_problem
from tidegate.types import GpuId, NodeId, Role

USUAL_PROMPTS, USUAL_MEMBERS = 2048, 4
"""The size of a sample of usual lengths. The means of two such samples differ by 1 %."""


class ScenarioError(ConfigError):
    """The scenario cannot be run. The message has one fault a line."""


class Scenario(ScenarioSections):
    """All values of one simulated iteration, without the policy."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Scenario:
        if found := scenario_faults(self) or physics_faults(self):
            raise ValueError("\n".join(found))
        return self

    def placement(self) -> Placement:
        gpus = self.cluster.gpus()
        has = {role: tuple(gpus[index] for index in gpus_of(self, role)) for role in Role}
        actor = has[Role.ACTOR]
        return Placement(gpus, has[Role.ROLLOUT], has[Role.INFERENCE], actor, home_layout(self) if actor else None)

    def laws(self) -> CostLaws:
        """The times in force: those of `costs`, or those that `physics` computes for usual lengths of responses.

        ScenarioError as `read_lengths`."""
        if not self.is_computed:
            return self.costs
        own = self.algorithm
        update_sequences = own.prompts_per_iteration / own.n_minibatches * own.group_size
        usual = self.workload_of(self._usual_lengths())
        return computed_laws(self, expected_work(usual, update_sequences))

    def _usual_lengths(self) -> Lengths:
        """A sample of what earlier iterations had. No number of it is a length of this iteration, except in a trace."""
        if self.lengths.law is LengthLaw.TRACE:
            return self.read_lengths()
        rng = np.random.default_rng(0)
        return draw_lengths(self.lengths, num_prompts=USUAL_PROMPTS, group_size=USUAL_MEMBERS, rng=rng)

    def scheduled_faults(self) -> tuple[Fault, ...]:
        """Those of the job and of its first iteration."""
        return tuple(_scheduled(fault, self.cluster.gpus()) for fault in self.faults if not fault.iteration)

    def faults_of(self, iteration: int, *, began_s: float) -> tuple[Fault, ...]:
        """The faults whose times count from the beginning of this iteration, which is not the first."""
        own = (fault for fault in self.faults if fault.iteration == iteration)
        scheduled = (_scheduled(fault, self.cluster.gpus()) for fault in own)
        return tuple(replace(fault, at_s=began_s + fault.at_s) for fault in scheduled)

    def read_lengths(self, seed: int | tuple[int, int] | None = None) -> Lengths:
        """The lengths, drawn or from the file. `seed` may be one of several words, as for numpy's generators.

        ScenarioError: the file is not a trace of this job.
        """
        rng = np.random.default_rng(self.seed if seed is None else seed)
        if self.lengths.law is not LengthLaw.TRACE:
            own = self.algorithm
            return draw_lengths(self.lengths, num_prompts=own.prompts_per_iteration, group_size=own.group_size, rng=rng)
        return lengths_of_trace(_read_trace(self), self.lengths, rng)

    def workload(self, seed: int | None = None) -> Workload:
        """ScenarioError as `read_lengths`."""
        return self.workload_of(self.read_lengths(seed))

    def workload_of(self, lengths: Lengths) -> Workload:
        own = self.algorithm
        return Workload(
            lengths=lengths,
            n_minibatches=own.n_minibatches,
            prompt_tokens=own.prompt_tokens,
            minibatch_order=own.minibatch_order,
            streams=own.streams,
            carries_gradients=self.carries_gradients,
            scores_ahead=self.scores_ahead,
            limits=own.micro_batches.limits() if own.micro_batches else None,
            num_logical_shards=self.actor_num_logical_shards,
            observation_tokens=self.lengths.observation_tokens,
            environment_s=self.lengths.environment_s,
        )

    def world(self, seed: int | None = None) -> World:
        """ScenarioError as `read_lengths`."""
        noise = Noise(self.noise, self.seed if seed is None else seed)
        own = self.workload(seed), self.laws(), self.placement(), self.scheduled_faults()
        return World(*own, self.reshard_model, noise)


def read_drift(scenario: Scenario) -> Drift:
    """The curves of the scenario's drift. ScenarioError: its file has no curve."""
    text = _text_of(scenario.drift.file, key="drift.file", content="a point a line") if scenario.drift.file else None
    try:
        return drift_of(scenario.drift, file_text=text)
    except BadCurve as error:
        raise ScenarioError(str(error)) from error


_FILE_NAMES = {path: mark for path, info in fields_of(Scenario) for mark in info.metadata if isinstance(mark, FileName)}
_CURVES = ("mean_tokens", "median_tokens", "sigma_prompt", "trained_share")
_WHOLE = frozenset(
    {("cluster", "nodes"), ("costs", "trainer", "layout_efficiency"), *(("drift", name) for name in _CURVES)}
)


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """ScenarioError lists all faults, also those of the lengths file and of the drift's file."""
    try:
        layer = _layered(path, overrides)
    except ValueError as error:
        raise ScenarioError(str(error)) from error
    scenario = parse_scenario(layer.values, layer=layer)
    if scenario.lengths.law is LengthLaw.TRACE:
        _read_trace(scenario)
    read_drift(scenario)
    return scenario


def parse_scenario(raw: object, *, layer: Layer = EMPTY_LAYER) -> Scenario:
    """ScenarioError lists every fault. `layer` has the origins of the values."""
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        found = [(fault_line(Scenario, fault), fault["loc"]) for fault in error.errors()]
        lines = [with_origin(text, layer, at) if at else with_origins(text, layer) for text, at in found]
        raise ScenarioError("\n".join(lines)) from error


def is_scenario(path: Path) -> bool:
    """Whether the file has the key of every scenario that no job's config has. Faults are not checked here."""
    try:
        values = _file_layer(path).values
    except ScenarioError:
        return False
    cluster = values.get("cluster")
    return isinstance(cluster, dict) and "placement" in cluster


def _layered(path: Path, overrides: Sequence[str]) -> Layer:
    lowest = merge_layers(EMPTY_LAYER, _file_layer(path), whole=_WHOLE)

    def with_override(below: Layer, text: str) -> Layer:
        override = parse_override(text)
        origin = Origin(f"override {dotted(override.path)}", Path(), layer=1)
        return apply_override(below, override, origin, whole=_WHOLE)

    return with_absolute_paths(reduce(with_override, overrides, lowest), _FILE_NAMES)


def _file_layer(path: Path) -> Layer:
    try:
        document = read_yaml(path.read_text())
    except OSError as error:
        raise ScenarioError(f"scenario {path}: {error.strerror}; give the path of a YAML file") from error
    except AmbiguousYaml as error:
        raise ScenarioError(f"scenario {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScenarioError(f"scenario {path} is not YAML: {yaml_problem(error)}; correct it there") from error
    if not isinstance(document.value, dict):
        raise ScenarioError(f"scenario {path} must hold keys and values such as cluster:, found {document.value!r}")
    if "job" in document.value:
        raise ScenarioError(f"{path} is a job's config and no scenario: `tidegate plan {path}` simulates its iteration")
    origins = {at: Origin(f"{path}:{line}", path.parent, 0) for at, line in document.lines.items()}
    return Layer(document.value, origins)


def _read_trace(scenario: Scenario) -> tuple[tuple[tuple[int, ...], ...], ...]:
    path, own = scenario.lengths.file, scenario.algorithm
    text = _text_of(path, key="lengths.file", content="one line a prompt")
    try:
        turns = parse_trace(text, name=path, group_size=own.group_size, max_tokens=scenario.lengths.max_tokens)
    except BadTrace as error:
        raise ScenarioError(str(error)) from error
    if len(turns) != own.prompts_per_iteration:
        raise ScenarioError(
            f"{path} has {len(turns)} prompts and algorithm.prompts_per_iteration={own.prompts_per_iteration}: "
            "make them the same"
        )
    return turns


def _text_of(path: str, *, key: str, content: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ScenarioError(f"{key} {path}: {error.strerror}; name a file of {content}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{key} {path} is no text: {error.reason}; name a file of {content}") from error
    except ValueError as error:
        # No file can have this name: it contains a NUL.
        raise ScenarioError(f"{key} {path!r}: {error}; name a file of {content}") from error


def _scheduled(fault: FaultSection, gpus: tuple[GpuId, ...]) -> Fault:
    if fault.gpu is not None and fault.kind == "gpu":
        return GpuFault(fault.at_s, gpus[fault.gpu], fault.back_after_s)
    if fault.node is not None and fault.kind == "node":
        return NodeFault(fault.at_s, NodeId(fault.node), fault.back_after_s)
    if fault.engine is not None and fault.kind == "engine":
        return EngineFault(fault.at_s, fault.engine)
    assert fault.what is not None, "a fault's fields were checked with its scenario"
    return LateFault(fault.at_s, fault.what, fault.late_s)
