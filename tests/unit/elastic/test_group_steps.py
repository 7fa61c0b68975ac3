"""Steps that an optimizer's groups count go on over a start; torch's Adam, which counts them itself, is let be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.elastic.model.compat import group_steps, set_group_steps


@dataclass
class Chained:
    """As Megatron's: links that wrap an optimizer, and the groups of all."""

    chained_optimizers: list[Link]

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return [group for link in self.chained_optimizers for group in link.optimizer.param_groups]


@dataclass
class Link:
    optimizer: torch.optim.Optimizer
    is_stub_optimizer: bool = False


def counting_by_group() -> torch.optim.Optimizer:
    """Two groups; like FusedAdam it keeps what is put into them."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)


def test_groups_go_on_from_the_greatest_count_since_an_empty_one_counts_nothing() -> None:
    before, after = counting_by_group(), counting_by_group()
    before.param_groups[1]["step"] = 7
    steps = group_steps(Chained([Link(before)]))
    assert steps == 7
    set_group_steps(Chained([Link(after)]), steps)
    assert [group["step"] for group in after.param_groups] == [7, 7]


def test_an_adam_that_counts_by_parameter_is_given_no_steps() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    assert group_steps(Chained([Link(adam)])) is None
    set_group_steps(Chained([Link(adam)]), 7)
    assert all("step" not in group for group in adam.param_groups)
