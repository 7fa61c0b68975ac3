"""What Megatron's DistributedOptimizer keeps on this rank, by logical name: Adam's moments and step counts.

Each data-parallel replica holds a flat range of each parameter, or none of it. Invariants: every range has its moments
and a step count of its own from the start (torch's Adam makes them at its first step only; upstream's own load gives
all parameters one shared step tensor, which then counts once per parameter); loading copies into these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """The state of the one DistributedOptimizer in a `get_megatron_optimizer` chain."""

    def __init__(self, optimizer: Any) -> None:
        (self._distributed,) = optimizer.chained_optimizers
        if not isinstance(self._adam, torch.optim.Adam):
            raise ValueError(
                f"Megatron chose {type(self._adam).__qualname__}, which keeps its step count elsewhere than torch's "
                "Adam, so that a checkpoint would lose it: run without Transformer Engine and Apex installed"
            )
        self.start_anew()

    def tensors(self, named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """This rank's own state tensors, not copies: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
        return {
            f"{key}/{name}": self._adam.state[main][key]
            for name, main in self._held(named)
            for key in (*_MOMENTS, "step")
        }

    def gradients(self, named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Reduced gradients in the parameters' shapes; NaN outside this rank's range."""
        gradients = {name: torch.full_like(tensor, torch.nan, requires_grad=False) for name, tensor in named.items()}
        for name, _ in self._held(named):
            main_gradient: torch.Tensor = getattr(named[name], "main_grad")  # noqa: B009 - Megatron sets it on tensors
            held = self._distributed._get_model_param_range_map(named[name])["param"]
            source = main_gradient.view(-1)[held.start : held.end]
            gradients[name].view(-1)[held.start : held.end] = source
        return gradients

    @property
    def _adam(self) -> torch.optim.Optimizer:
        adam: torch.optim.Optimizer = self._distributed.optimizer
        return adam

    def start_anew(self) -> None:
        """Zero moments and step counts, as before the first step."""
        for group in self._adam.param_groups:
            for main in group["params"]:
                state = self._adam.state[main]
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(main)
                state["step"] = torch.zeros((), dtype=torch.float32)

    def _held(self, named: Mapping[str, torch.nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, main parameter) of each parameter of which this rank holds a range."""
        places = self._distributed.model_param_group_index_map
        for name, tensor in named.items():
            if tensor in places:
                group, order = places[tensor]
                yield name, self._adam.param_groups[group]["params"][order]
