"""Predictions of a job's iteration, for people and for programs: rows, the start to choose, and the assumptions.

Invariant: savings are relative to `static` as configured, which is a job without moves.
[test_plan_report: times_are_relative_to]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.assumptions import Assumption
from simulator.gpus import Doing
from simulator.job_scenario import (
    COST_KEYS,
    LENGTH_KEYS,
    PACED_KEYS,
    PROMPT_SHARE,
    PredictionBasis,
    scenario_of,
)
from simulator.planning.predictions import Prediction
from simulator.planning.starts import AS_CONFIGURED
from simulator.run import Run
from simulator.used_assumptions import used_assumptions
from tidegate.config.job_config import JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.types import Role

SLOWER_COLUMNS = ("policy", "placement", "seconds", "moves", "working_s", "switching_s", "idle_s")
ROW_COLUMNS = ("placement", "actor", "rollout", "inference", "policy", "seconds", "against_static")
DEFAULT = "default"
SIMULATORS = "the simulator's default"
"""The source shown for a value that no config key sets. A calibrated scenario may set it."""
PACED = "modelled slots"
"""The source shown for a value of `PACED_KEYS` in a job on modelled slots."""
_ASSUMED_PROMPTS = f"{PROMPT_SHARE:.2f} of what algorithm.max_new_tokens leaves of model.max_seq_len"
_PROMPTS_SOURCE = {False: "the task's prompts", True: "the calibrated scenario"}
"""By whether the job was calibrated."""
_CONFIGS_PHYSICS = {
    "physics.trainer.recompute": "actor.recompute",
    "physics.trainer.micro_batch_tokens": "actor.max_tokens_per_microbatch",
    "physics.memory.weight_bytes": "actor.precision",
    "physics.memory.optimizer_bytes": "actor.precision",
}
"""The key of a config that sets a number of the physics."""
_MOVES = {True: "reshard_setup_s, communicators_s", False: "reshard_s"}
"""The keys that price a reshard, beside its bytes. True: the reshard has a plan."""
DEFAULT_NOTE = "default: of a 7B model on 64 GPUs of 80 GB; `tidegate calibrate` fits them to a run of the job"
_LEAST_GAIN = 0.005
"""A share of the time. A smaller gain of a start or policy counts as none: one iteration's lengths vary as much."""
_LEAST_LOSS = 0.05
"""A share of the time. From this loss on, the report says why a policy is slower than staying as configured."""


def as_json(config: JobConfig, given: Layer, found: Sequence[Prediction], known: PredictionBasis) -> dict[str, Any]:
    return {
        "job": config.job,
        "seed": config.seed,
        "num_gpus": sum(len(config.placement(role)) for role in Role),
        "predictions": [_full_row(each, found[0]) for each in found],
        "best": _full_row(best(found), found[0]),
        "best_static": _full_row(best(_under(found, "static")), found[0]),
        "assumptions": list(assumptions(config, given, known)),
    }


def rows(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [
        _placed(each)
        | {
            "policy": each.policy,
            "seconds": round(each.iteration_s, 2) if each.run else None,
            "against_static": against(each.iteration_s, found[0].iteration_s) if each.run else None,
        }
        for each in found
    ]


def advice(found: Sequence[Prediction]) -> Iterator[str]:
    """The start to choose. Then why a policy cannot run from some placements, each reason once."""
    chosen, static = best(found), best(_under(found, "static"))
    yield f"start from {_advice_line(chosen, found[0])}"
    if chosen is not static:
        yield f"without moves, start from {_advice_line(static, found[0])}"
    for refused in dict.fromkeys(each.refused for each in found if each.refused):
        where = ", ".join(each.start.name for each in found if each.refused == refused)
        yield f"not from {where}: {refused}"


def slower_rows(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Static as configured, and each policy that is slower from every start. Empty where no policy is.

    Each row has what a GPU does on average. The parts add up to the iteration.
    """
    under = [best(_under(found, name)) for name in dict.fromkeys(each.policy for each in found)]
    least_s = found[0].iteration_s * (1 + _LEAST_LOSS)
    slower = [each for each in under if each.run and each.iteration_s > least_s]
    return [_time_parts(each, each.run) for each in (found[0], *slower) if each.run] if slower else []


def cost_of_moves_note(known: PredictionBasis) -> str:
    assumed = f"release_s, acquire_s, {_MOVES[known.model is not None]}, load_s and inference_start_s"
    own = "costs.switch, which no calibration fits" if known.is_calibrated else f"assumed (assumptions.costs.{assumed})"
    return f"The time of moves is {own}. On a short iteration moves take more than they gain."


def against(seconds: float, static_s: float) -> str:
    """The time of an iteration relative to another, as people say it. It never shows a difference of -0."""
    percent = round(100 * (seconds / static_s - 1), 1)
    if percent == 0:
        return "the same"
    if percent < 0:
        return f"{-percent:.1f} % saved"
    return f"{percent:.1f} % slower" if percent < 100 else f"{seconds / static_s:,.1f} times as long"


def best(found: Sequence[Prediction]) -> Prediction:
    """The first prediction that is as short as any; see `_LEAST_GAIN`."""
    shortest_s = min(each.iteration_s for each in found)
    return next(each for each in found if each.iteration_s * (1 - _LEAST_GAIN) <= shortest_s)


def assumptions(config: JobConfig, given: Layer, known: PredictionBasis) -> Iterator[dict[str, Any]]:
    """The assumptions that the predictions use, and no others, each with its value and its source."""
    scenario = scenario_of(config, known)
    for own in used_assumptions(scenario):
        if own.key.startswith(("costs.", "lengths.", "physics.")) and own.key not in _said_by_config(known):
            key, source = _named(own, given, known)
            if source == SIMULATORS and own.key in PACED_KEYS and config.cluster.pace is not None:
                source = PACED
            yield {"key": key, "value": own.value, "source": source}
    model = scenario.reshard_model
    size = model.num_parameters if model else None
    yield {"key": "model.num_parameters", "value": size, "source": known.model_source}
    source = _PROMPTS_SOURCE[known.is_calibrated] if known.prompt_tokens is not None else _ASSUMED_PROMPTS
    yield {"key": "prompt_tokens", "value": scenario.algorithm.prompt_tokens, "source": source}


def _said_by_config(known: PredictionBasis) -> frozenset[str]:
    """The keys of a scenario that the job's config sets."""
    own = (
        ()
        if known.is_calibrated
        else ("costs.engine.gpus_per_engine", "costs.engine.max_running", "lengths.min_tokens")
    )
    return frozenset({"lengths.max_tokens", *own})


def _named(assumption: Assumption, given: Layer, known: PredictionBasis) -> tuple[str, str]:
    """The key that a person would set for this key of the scenario, and where it was set."""
    key = assumption.key
    if known.is_calibrated:
        return key, "the calibrated scenario"
    if key.startswith("physics.shape."):
        return key, "the job's model"
    if key in _CONFIGS_PHYSICS and assumption.value != assumption.default:
        return key, f"{_CONFIGS_PHYSICS[key]} of the config"
    section, *path = key.split(".")
    own = LENGTH_KEYS.get(path[-1]) if section == "lengths" else COST_KEYS.get((path[0], path[-1]))
    if own is None or section == "physics":
        return key, assumption.source if known.is_computed else SIMULATORS
    origin = given.origins.get(("assumptions", section, own))
    if known.is_computed and section == "costs" and origin is None:
        return key, assumption.source
    return f"assumptions.{section}.{own}", origin.place if origin else DEFAULT


def _placed(each: Prediction) -> dict[str, Any]:
    gpus = {role.value: each.start.gpus(role) for role in Role}
    return {"placement": each.start.name, **{name: gpus[name] for name in ("actor", "rollout", "inference")}}


def _full_row(each: Prediction, first: Prediction) -> dict[str, Any]:
    return _placed(each) | {
        "policy": each.policy,
        "iteration_s": round(each.iteration_s, 3) if each.run else None,
        "saved_percent": _saved_percent(each, first) if each.run else None,
        "num_moves": each.run.num_moves if each.run else None,
        "refused": each.refused,
    }


def _saved_percent(each: Prediction, first: Prediction) -> float:
    """A rounded figure that is never -0."""
    return round(100 * (1 - each.iteration_s / first.iteration_s), 2) + 0.0


def _under(found: Sequence[Prediction], policy: str) -> list[Prediction]:
    return [each for each in found if each.policy == policy]


def _advice_line(each: Prediction, first: Prediction) -> str:
    text = f"{_where(each)} under {each.policy}: {each.iteration_s:.4g} s an iteration"
    if each is first:
        return f"{text}, as it is"
    beside = against(each.iteration_s, first.iteration_s)
    word = "as" if beside == "the same" else "against"
    return f"{text}, {beside} {word} static as configured, {first.iteration_s:.4g} s"


def _where(each: Prediction) -> str:
    gpus = ", ".join(f"{role} {each.start.gpus(role)}" for role in Role)
    return f"the placement {AS_CONFIGURED}" if each.start.name == AS_CONFIGURED else f"'{each.start.name}' ({gpus})"


def _time_parts(each: Prediction, run: Run) -> dict[str, Any]:
    parts = {
        "working": (Doing.GENERATING, Doing.INFERRING, Doing.TRAINING),
        "switching": (Doing.SWITCHING,),
        "idle": (Doing.WAITING, Doing.FREE),
    }
    seconds = {f"{name}_s": round(_per_gpu_s(run, states), 2) for name, states in parts.items()}
    own = {"policy": each.policy, "placement": each.start.name, "seconds": round(run.iteration_s, 2)}
    return own | {"moves": run.num_moves} | seconds


def _per_gpu_s(run: Run, states: Sequence[Doing]) -> float:
    spans = [span for own in run.timeline.values() for span in own if span.state in states]
    return sum(span.end_s - span.start_s for span in spans) / len(run.timeline)
