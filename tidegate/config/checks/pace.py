"""Faults of modelled slots (`cluster.pace`) and of drawn lengths (`rollout.length_law`)."""

from __future__ import annotations

from tidegate.config.sections.job import ClusterSection, JobSections

BUDGET_SHARE = 0.7
"""The largest share of the machine's cores that the slots may be given. The rest is for the services, the servers and
the launcher, which run beside them. Ours: above it, steps wait for cores, and the run becomes void."""


def pace_faults(config: JobSections) -> list[str]:
    faults = []
    if config.cluster.pace is not None:
        if config.cluster.device != "cpu":
            faults.append(
                f"cluster.pace models the speed of CPU slots, and cluster.device is {config.cluster.device}: set it to "
                "cpu, or leave cluster.pace out"
            )
        if config.rollout.engine != "embedded":
            faults.append(
                f"cluster.pace cannot slow down the steps of rollout.engine={config.rollout.engine}, a server of its "
                "own: set the engine to embedded, or leave cluster.pace out"
            )
    if config.rollout.length_law is not None:
        if config.rollout.engine != "embedded":
            faults.append(
                f"rollout.length_law needs an engine that ends a response at its length, and rollout.engine is "
                f"{config.rollout.engine}: set it to embedded, or leave rollout.length_law out"
            )
        if config.algorithm.mask_truncated:
            faults.append(
                "algorithm.mask_truncated=true leaves every response of rollout.length_law out of the loss, because "
                "their length ends them all: set it to false"
            )
    return faults


def budget_fault(cluster: ClusterSection, *, num_cores: float) -> str | None:
    """The fault of the slots' budgets on a machine that gives this process `num_cores` cores. None: they fit."""
    if cluster.pace is None:
        return None
    each, num_slots, room = cluster.pace.cores_per_slot, len(cluster.gpus()), BUDGET_SHARE * num_cores
    if each * num_slots <= room:
        return None
    return (
        f"cluster.pace.cores_per_slot={each:g} gives {num_slots} slots {each * num_slots:.2f} cores, more than "
        f"{BUDGET_SHARE:.0%} of the {num_cores:g} cores here ({room:.2f}): lower it to {room / num_slots:.3f} or less "
        f"and raise cluster.pace.time_scale as much, or name at most {int(room / each)} slots in cluster.nodes"
    )
