"""Determines from an optimizer's config whether it can change its layout, and which state it keeps.

The config alone decides, before any optimizer is built, so that members that build none know it too.

Invariant: an optimizer that is not refused here keeps exactly the tensors that `optimizer_form` names.
[test_skeleton: holds_exactly_what_the_planner_says]
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, OptimizerConfig

from tidegate.elastic.plan.optimizers import ADAM, OptimizerRefused, StateKind, StateTensor, require_supported
from tidegate.elastic.plan.parameters import Parameter


def optimizer_form(config: OptimizerConfig) -> tuple[tuple[StateTensor, ...], int | None]:
    """The `states` and `step_itemsize` of the planner's DistributedOptimizer.

    In fp32 the parameters are the main parameters. FusedAdam keeps its steps in its parameter groups, see
    `param_groups`.
    """
    states = ADAM if config.bf16 else tuple(state for state in ADAM if state.kind is not StateKind.MAIN_PARAM)
    return states, 4 if USING_PYTORCH_OPTIMIZER else None


def check_config(config: OptimizerConfig, parameters: Iterable[Parameter]) -> None:
    """Raises OptimizerRefused where the config, or the config with these parameters, cannot change its layout."""
    require_supported(_class_names(config))
    refused = {
        "use_distributed_optimizer=False": not config.use_distributed_optimizer,
        "use_precision_aware_optimizer=True": config.use_precision_aware_optimizer,
        "fp16=True": config.fp16,
        "optimizer_cuda_graph=True": config.optimizer_cuda_graph,
    }
    if settings := [setting for setting, is_so in refused.items() if is_so]:
        raise OptimizerRefused(
            f"an optimizer with {', '.join(settings)} cannot change its layout: what moves is a DistributedOptimizer's "
            "state in fp32, without a loss scale and recorded addresses; train in fp32 or bf16 without these"
        )
    itemsizes = {parameter.itemsize for parameter in parameters if parameter.trainable}
    want = 2 if config.bf16 else 4
    if itemsizes - {want}:
        raise OptimizerRefused(
            f"the model trains parameters of {sorted(itemsizes)} bytes an element, and with bf16={config.bf16} all "
            f"must have {want}: build the model in one dtype and give the optimizer the same"
        )


def _class_names(config: OptimizerConfig) -> list[str]:
    """The classes that Megatron would build."""
    names = ["DistributedOptimizer"]
    if config.use_layer_wise_distributed_optimizer or config.optimizer.startswith("dist_"):
        names.append("LayerWiseDistributedOptimizer")
    if config.optimizer_cpu_offload:
        names.append("HybridDeviceOptimizer")
    if config.optimizer != "adam":
        names.append(config.optimizer)
    return names
