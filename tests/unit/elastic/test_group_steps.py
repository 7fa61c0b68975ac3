"""Step counts in an optimizer's groups continue after a start. torch's Adam counts per parameter and is left alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.elastic.model.compat import group_steps, set_group_steps


@dataclass
class Chained:
    """Like Megatron's chain: links that wrap an optimizer each, and the groups of all."""

    chained_optimizers: list[Link]

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return [group for link in self.chained_optimizers for group in link.optimizer.param_groups]


@dataclass
class Link:
    optimizer: torch.optim.Optimizer
    is_stub_optimizer: bool = False


def counting_by_group() -> torch.optim.Optimizer:
    """Two groups. Like FusedAdam it keeps the values that are put into them."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)


def test_groups_continue_from_the_greatest_count_because_an_empty_group_counts_nothing() -> None:
    before, after = counting_by_group(), counting_by_group()
    before.param_groups[1]["step"] = 7
    steps = group_steps(Chained([Link(before)]))
    assert steps == 7
    set_group_steps(Chained([Link(after)]), steps)
    assert [group["step"] for group in after.param_groups] == [7, 7]


def test_an_adam_that_counts_by_parameter_receives_no_steps() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    assert group_steps(Chained([Link(adam)])) is None
    set_group_steps(Chained([Link(adam)]), 7)
    assert all("step" not in group for group in adam.param_groups)
