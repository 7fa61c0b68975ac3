"""Predictions of a job's iteration for people and for programs: rows, what to start from, what it all stands on.

Invariant: what would be saved is told against `static` as configured, which is what a job does without moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.planning import AS_CONFIGURED, PROMPT_SHARE, Calibrated, Prediction, scenario_of
from tidegate.config import JobConfig
from tidegate.config_base import fields_of
from tidegate.config_layers import Layer, dotted
from tidegate.types import Role

ROW_COLUMNS = ("placement", "actor", "rollout", "inference", "policy", "seconds", "saved_%")
DEFAULT = "default"
DEFAULT_TOLD = "default: of a 7B model on 64 GPUs of 80 GB; `tidegate calibrate` fits them to a run of the job"
_LEAST_GAIN = 0.005
"""Of the time: below it another start or policy is taken for no better; one iteration's lengths decide as much."""


def as_json(
    config: JobConfig, given: Layer, found: Sequence[Prediction], calibrated: Calibrated | None
) -> dict[str, Any]:
    return {
        "job": config.job,
        "seed": config.seed,
        "num_gpus": sum(len(config.placement(role)) for role in Role),
        "predictions": [_full_row(each, found[0]) for each in found],
        "best": _full_row(best(found), found[0]),
        "best_static": _full_row(best([each for each in found if each.policy == "static"]), found[0]),
        "assumptions": list(assumptions(config, given, calibrated)),
    }


def rows(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [
        _placed(each)
        | {
            "policy": each.policy,
            "seconds": round(each.iteration_s, 2) if each.run else None,
            "saved_%": round(_saved_percent(each, found[0]), 1) if each.run else None,
        }
        for each in found
    ]


def advice(found: Sequence[Prediction]) -> Iterator[str]:
    """What to start from; then why a policy cannot run from somewhere, each reason once."""
    static = best([each for each in found if each.policy == "static"])
    yield f"start from {_told(best(found), found[0])}"
    yield f"without moves, start from {_told(static, found[0])}"
    for refused in dict.fromkeys(each.refused for each in found if each.refused):
        where = ", ".join(each.start.name for each in found if each.refused == refused)
        yield f"not from {where}: {refused}"


def best(found: Sequence[Prediction]) -> Prediction:
    """The first that is as short as any; see `_LEAST_GAIN`."""
    shortest_s = min(each.iteration_s for each in found)
    return next(each for each in found if each.iteration_s * (1 - _LEAST_GAIN) <= shortest_s)


def assumptions(config: JobConfig, given: Layer, calibrated: Calibrated | None) -> Iterator[dict[str, Any]]:
    """Each with its value and where that is from."""
    if calibrated is not None:
        for own in scenario_of(config, calibrated).assumptions():
            if own.key.startswith(("costs.", "lengths.")):
                yield {"key": own.key, "value": own.value, "source": "the calibrated scenario"}
    else:
        for path, _ in fields_of(type(config)):
            if path[0] == "assumptions":
                yield {"key": dotted(path), "value": _at(config, path), "source": _source(path, given)}
    told = f"{PROMPT_SHARE:.2f} of what algorithm.max_new_tokens leaves of model.max_seq_len"
    yield {"key": "prompt_tokens", "value": scenario_of(config, calibrated).algorithm.prompt_tokens, "source": told}


def _source(path: tuple[str, ...], given: Layer) -> str:
    origin = given.origins.get(path)
    return origin.told if origin else DEFAULT


def _at(config: JobConfig, path: tuple[str, ...]) -> Any:
    value: Any = config
    for part in path:
        value = getattr(value, part)
    return value


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


def _told(each: Prediction, first: Prediction) -> str:
    gpus = ", ".join(f"{role} {each.start.gpus(role)}" for role in Role)
    where = f"the placement {AS_CONFIGURED}" if each.start.name == AS_CONFIGURED else f"'{each.start.name}' ({gpus})"
    saved = _saved_percent(each, first)
    told = f"{saved:.1f} % less than" if saved >= 0 else f"{-saved:.1f} % more than"
    against = f"{told} static as configured, {first.iteration_s:.4g} s" if each is not first else "as it is"
    return f"{where} under {each.policy}: {each.iteration_s:.4g} s an iteration, {against}"
