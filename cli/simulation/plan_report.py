"""Predictions of a job's iteration for people and for programs: rows, what to start from, what it all stands on.

Invariant: what would be saved is told against `static` as configured, which is what a job does without moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.gpus import Doing
from simulator.predictions import AS_CONFIGURED, COST_KEYS, LENGTH_KEYS, PROMPT_SHARE, Known, Prediction, scenario_of
from simulator.run import Run
from simulator.used_assumptions import used_assumptions
from tidegate.config.job_config import JobConfig
from tidegate.config.reading.layers import Layer
from tidegate.types import Role

SLOWER_COLUMNS = ("policy", "placement", "seconds", "moves", "working_s", "switching_s", "idle_s")
ROW_COLUMNS = ("placement", "actor", "rollout", "inference", "policy", "seconds", "against_static")
DEFAULT = "default"
SIMULATORS = "the simulator's default"
"""Of what no key of a config says; a calibrated scenario may."""
_MOVES = {True: "reshard_setup_s, communicators_s", False: "reshard_s"}
"""What a reshard is priced by, beside its bytes: by whether it has a plan."""
DEFAULT_TOLD = "default: of a 7B model on 64 GPUs of 80 GB; `tidegate calibrate` fits them to a run of the job"
_LEAST_GAIN = 0.005
"""Of the time: below it another start or policy is taken for no better; one iteration's lengths decide as much."""
_LEAST_LOSS = 0.05
"""Of the time: from it on a policy that is slower than staying as configured is told what makes it so."""


def as_json(config: JobConfig, given: Layer, found: Sequence[Prediction], known: Known) -> dict[str, Any]:
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
    """What to start from; then why a policy cannot run from somewhere, each reason once."""
    chosen, static = best(found), best(_under(found, "static"))
    yield f"start from {_told(chosen, found[0])}"
    if chosen is not static:
        yield f"without moves, start from {_told(static, found[0])}"
    for refused in dict.fromkeys(each.refused for each in found if each.refused):
        where = ", ".join(each.start.name for each in found if each.refused == refused)
        yield f"not from {where}: {refused}"


def slower_rows(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Static as configured, and each policy that is slower from wherever it starts, by what a GPU does on average,
    which adds up to the iteration; none where no policy is."""
    under = [best(_under(found, name)) for name in dict.fromkeys(each.policy for each in found)]
    least_s = found[0].iteration_s * (1 + _LEAST_LOSS)
    slower = [each for each in under if each.run and each.iteration_s > least_s]
    return [_spent(each, each.run) for each in (found[0], *slower) if each.run] if slower else []


def moves_told(known: Known) -> str:
    assumed = f"release_s, acquire_s, {_MOVES[known.model is not None]}, load_s and inference_start_s"
    own = "costs.switch, which no calibration fits" if known.is_calibrated else f"assumed (assumptions.costs.{assumed})"
    return f"What moves take is {own}: on a short iteration it is more than they gain."


def against(seconds: float, static_s: float) -> str:
    """What one iteration takes beside another, as people say it: nothing is ever less than nothing."""
    percent = round(100 * (seconds / static_s - 1), 1)
    if percent == 0:
        return "the same"
    if percent < 0:
        return f"{-percent:.1f} % saved"
    return f"{percent:.1f} % slower" if percent < 100 else f"{seconds / static_s:,.1f} times as long"


def best(found: Sequence[Prediction]) -> Prediction:
    """The first that is as short as any; see `_LEAST_GAIN`."""
    shortest_s = min(each.iteration_s for each in found)
    return next(each for each in found if each.iteration_s * (1 - _LEAST_GAIN) <= shortest_s)


def assumptions(config: JobConfig, given: Layer, known: Known) -> Iterator[dict[str, Any]]:
    """Those that the predictions stand on, and no others, each with its value and where that is from."""
    scenario = scenario_of(config, known)
    for own in used_assumptions(scenario):
        if own.key.startswith(("costs.", "lengths.")) and own.key not in _said_by_config(known):
            key, source = _named(own.key, given, known)
            yield {"key": key, "value": own.value, "source": source}
    size = known.model.num_parameters if known.model else None
    yield {"key": "model.num_parameters", "value": size, "source": known.model_told}
    told = f"{PROMPT_SHARE:.2f} of what algorithm.max_new_tokens leaves of model.max_seq_len"
    yield {"key": "prompt_tokens", "value": scenario.algorithm.prompt_tokens, "source": told}


def _said_by_config(known: Known) -> frozenset[str]:
    """Keys of a scenario that the job's config settles."""
    own = (
        ()
        if known.is_calibrated
        else ("costs.engine.gpus_per_engine", "costs.engine.max_running", "lengths.min_tokens")
    )
    return frozenset({"lengths.max_tokens", *own})


def _named(key: str, given: Layer, known: Known) -> tuple[str, str]:
    """A scenario's key, as whoever plans would give it, and where it was given."""
    if known.is_calibrated:
        return key, "the calibrated scenario"
    section, *path = key.split(".")
    own = LENGTH_KEYS.get(path[-1]) if section == "lengths" else COST_KEYS.get((path[0], path[-1]))
    if own is None:
        return key, SIMULATORS
    origin = given.origins.get(("assumptions", section, own))
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
    """Rounded, so that nothing is never less than nothing."""
    return round(100 * (1 - each.iteration_s / first.iteration_s), 2) + 0.0


def _under(found: Sequence[Prediction], policy: str) -> list[Prediction]:
    return [each for each in found if each.policy == policy]


def _told(each: Prediction, first: Prediction) -> str:
    told = f"{_where(each)} under {each.policy}: {each.iteration_s:.4g} s an iteration"
    if each is first:
        return f"{told}, as it is"
    beside = against(each.iteration_s, first.iteration_s)
    word = "as" if beside == "the same" else "against"
    return f"{told}, {beside} {word} static as configured, {first.iteration_s:.4g} s"


def _where(each: Prediction) -> str:
    gpus = ", ".join(f"{role} {each.start.gpus(role)}" for role in Role)
    return f"the placement {AS_CONFIGURED}" if each.start.name == AS_CONFIGURED else f"'{each.start.name}' ({gpus})"


def _spent(each: Prediction, run: Run) -> dict[str, Any]:
    parts = {
        "working": (Doing.GENERATING, Doing.INFERRING, Doing.TRAINING),
        "switching": (Doing.SWITCHING,),
        "idle": (Doing.WAITING, Doing.FREE),
    }
    told = {f"{name}_s": round(_per_gpu_s(run, states), 2) for name, states in parts.items()}
    own = {"policy": each.policy, "placement": each.start.name, "seconds": round(run.iteration_s, 2)}
    return own | {"moves": run.num_moves} | told


def _per_gpu_s(run: Run, states: Sequence[Doing]) -> float:
    spans = [span for own in run.timeline.values() for span in own if span.state in states]
    return sum(span.end_s - span.start_s for span in spans) / len(run.timeline)
