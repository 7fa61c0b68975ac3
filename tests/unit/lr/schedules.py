"""A schedule of each shape, and a stand-in for an optimizer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tidegate.lr.schedule import Decay, LrSchedule, Steps, WsdDecay

SHAPES: dict[str, dict[str, Any]] = {
    "constant": {"decay": Decay.CONSTANT},
    "linear": {"decay": Decay.LINEAR},
    "cosine": {"decay": Decay.COSINE},
    "inverse square root": {"decay": Decay.INVERSE_SQUARE_ROOT},
    **{f"WSD, {style}": {"decay": Decay.WSD, "wsd_decay": style} for style in WsdDecay},
}
RATES = {"minimum": 1e-7, "initial": 3e-6}


class Groups:
    """A stand-in for an optimizer, with the parameter groups that Megatron's scheduler needs."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0, "weight_decay": 0.0}]


def schedule_of(shape: str, *, budget: Steps, warm_up: Steps, **rates: Any) -> LrSchedule:
    wsd_steps = (budget - warm_up) * Fraction(1, 2) if "WSD" in shape else 0
    return LrSchedule(3e-4, budget, warm_up, wsd_steps=wsd_steps, **SHAPES[shape], **rates)
