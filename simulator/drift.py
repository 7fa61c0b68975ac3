"""How a job's lengths change over its iterations: section `drift` of a scenario.

The mean length of an iteration is that of a curve, times the factors of its spikes. Its median is found such that the
law of the scenario, cut at its limit, has this mean. A filtered group has no spread of rewards: it is generated, and
neither scored nor trained.

The named curves are read off public training curves (lines of mean tokens over steps). Between the named points they
are straight lines, which is ours.

Invariants:
- The mean of an iteration's law is the curve's. [test_job_iterations: the_mean_of_the_law_is_the_curves]
- Without a curve every iteration has the scenario's law. [test_job_iterations: first_iteration_is_that_of_one_run]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from simulator.curves import Curve, curve_text, parse_curve
from tidegate.config.base import ConfigPath, Count, Positive, PositiveFloat, Section


class CurveName(StrEnum):
    ORZ_32B = "orz_32b"
    """Open-Reasoner-Zero 32B: 0.4k to 7k by step 1,100 with spikes (figure train_curve.png). The feet of the spikes,
    50 steps before and after, lie on the line from 0.4k to 7k; that is ours."""
    R1_DISTILL_1_5B = "r1_distill_1_5b"
    """R1-Distill-1.5B with limits of 8k, 16k from step 200 and 24k from step 358 (AReaL's distill curve)."""
    DAPO = "dapo"
    """DAPO on Qwen2.5-32B: 4 times the scenario's mean over 480 steps. Published are times and not tokens: generation
    4.6 times, training 3.6 times."""
    TO_10K = "to_10k"
    """1.5k to 10k over 200 steps: a plain line, ours."""


@dataclass(frozen=True, slots=True)
class NamedCurve:
    """`is_relative`: its values are factors of the scenario's mean. `limits`: the limits of stages; None: the
    scenario's."""

    mean: Curve
    is_relative: bool = False
    limits: Curve | None = None


NAMED = {
    CurveName.ORZ_32B: NamedCurve(
        Curve(
            (
                (0, 400.0),
                (400, 2_800.0),
                (450, 9_500.0),
                (560, 2_300.0),
                (630, 4_180.0),
                (680, 8_000.0),
                (730, 4_780.0),
                (960, 6_160.0),
                (1_010, 10_000.0),
                (1_060, 6_760.0),
                (1_100, 7_000.0),
            )
        )
    ),
    CurveName.R1_DISTILL_1_5B: NamedCurve(
        Curve(((0, 5_750.0), (200, 4_150.0), (358, 6_250.0), (440, 7_150.0))),
        limits=Curve(((0, 8_192.0), (200, 16_384.0), (358, 24_576.0))),
    ),
    CurveName.DAPO: NamedCurve(Curve(((0, 1.0), (480, 4.0))), is_relative=True),
    CurveName.TO_10K: NamedCurve(Curve(((0, 1_500.0), (200, 10_000.0)))),
}


_TOKENS = (1.0, 10_000_000.0)
"""The lengths that a curve may have."""


def _as_text(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, int | float):
        # YAML reads 1:30 as ninety.
        raise ValueError(
            f"drift.{info.field_name}={value} is one number, and a curve has points: write {{0: 1500, 200: 10000}}"
        )
    return curve_text(value) if isinstance(value, Mapping) else value


CurveText = Annotated[str, BeforeValidator(_as_text)]
"""The points of a curve, as text or as a mapping from iterations to values."""


class SpikeSection(Section):
    """The mean is `factor` times as long at `iteration`. The factor goes back to 1 in a line, `iterations` before and
    after."""

    iteration: Count
    factor: Annotated[PositiveFloat, Field(le=100)]
    iterations: Positive = 10


class DriftSection(Section):
    """At most one of the first four keys. None of them: the lengths do not drift."""

    mean_tokens: CurveText = ""
    """The curve of the mean length."""
    median_tokens: CurveText = ""
    """The curve of `lengths.median_tokens`."""
    curve: CurveName | None = None
    file: ConfigPath = ""
    """A file with the points of the mean, one a line."""
    sigma_prompt: CurveText = ""
    """The curve of `lengths.sigma_prompt`."""
    spikes: tuple[SpikeSection, ...] = ()
    trained_share: CurveText = ""
    """The curve of the share of groups with a spread of rewards. All others are filtered."""
    epoch_prompts: Positive | None = None
    """The prompts of an epoch. In the first epoch there are no hints, later those of the last one. None: every
    prompt has a hint, from its present level."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The curves of a section. None: the scenario's own value in every iteration."""

    mean: Curve | None = None
    median: Curve | None = None
    is_relative: bool = False
    """`mean` has factors of the scenario's mean."""
    limits: Curve | None = None
    sigma_prompt: Curve | None = None
    trained_share: Curve | None = None
    spikes: tuple[SpikeSection, ...] = ()

    def spike(self, iteration: int) -> float:
        """The factor of all spikes at an iteration."""
        factor = 1.0
        for each in self.spikes:
            share = max(0.0, 1 - abs(iteration - each.iteration) / each.iterations)
            factor *= 1 + (each.factor - 1) * share
        return factor


def drift_of(section: DriftSection, *, file_text: str | None = None) -> Drift:
    """The curves of a section. BadCurve names the key, or the file and the line.

    `file_text` is that of its file. None: the file is not read yet.
    """
    named = NAMED[section.curve] if section.curve else None
    mean = named.mean if named else _curve(section.mean_tokens, "drift.mean_tokens", _TOKENS)
    if section.file and file_text is not None:
        mean = parse_curve(file_text, name=section.file, low=_TOKENS[0], high=_TOKENS[1], has_lines=True)
    return Drift(
        mean=mean,
        median=_curve(section.median_tokens, "drift.median_tokens", _TOKENS),
        is_relative=bool(named and named.is_relative),
        limits=named.limits if named else None,
        sigma_prompt=_curve(section.sigma_prompt, "drift.sigma_prompt", (0.0, 10.0)),
        trained_share=_curve(section.trained_share, "drift.trained_share", (0.0, 1.0)),
        spikes=section.spikes,
    )


def _curve(text: str, key: str, within: tuple[float, float]) -> Curve | None:
    return parse_curve(text, name=key, low=within[0], high=within[1]) if text else None
