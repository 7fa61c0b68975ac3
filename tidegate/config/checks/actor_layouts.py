"""The layouts that a policy may choose for the actor besides its home's (`actor.layouts`), and their faults. Pure.

Whether the model fits a layout is checked where the model is known (`tidegate.job`), in the words of `layouts`.

Invariants:
- A layout that a policy may choose has no fault that a config's `actor.layout` would have.
  [test_allowed_layouts: has_no_fault_that_the_configured_one]
- In reproducible mode every layout that a policy may choose gives updates the same bits.
  [test_allowed_layouts: another_tp_or_cp_is_refused_in_reproducible_mode]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidegate.config.checks.layouts import replicas_fault
from tidegate.config.schedule import samples_per_update
from tidegate.config.sections.job import AllowedLayoutSection, JobSections
from tidegate.types import Layout, Role

KEY = "actor.layouts"


def policy_layouts(config: JobSections) -> tuple[Layout, ...]:
    """The layouts of `actor.layouts` in their order, those with the fewest copies first."""
    return allowed_layouts(
        config.actor.layouts,
        num_gpus=_num_gpus(config),
        num_samples=samples_per_update(config),
        num_shards=config.actor.num_logical_shards,
    )


def allowed_layouts(
    sections: Iterable[AllowedLayoutSection], *, num_gpus: int, num_samples: int, num_shards: int | None
) -> tuple[Layout, ...]:
    """Those on at most `num_gpus` GPUs whose replicas can share a minibatch of `num_samples`, each once."""
    return tuple(
        dict.fromkeys(
            layout
            for section in sections
            for layout in _of_section(section, num_gpus=num_gpus)
            if layout.num_ranks <= num_gpus
            and replicas_fault(layout, num_samples=num_samples, num_shards=num_shards) is None
        )
    )


def _of_section(section: AllowedLayoutSection, *, num_gpus: int) -> Iterator[Layout]:
    if section.dp is not None:
        yield section.layout()
        return
    for dp in range(1, num_gpus // section.layout().num_ranks + 1):
        if (layout := section.layout(dp)).dp * layout.cp % layout.ep == 0:
            yield layout


def actor_layout_faults(config: JobSections) -> list[str]:
    """The minibatches must divide. Each text is one fault."""
    return [
        f"{KEY}.{place}: {fault}"
        for place, section in enumerate(config.actor.layouts)
        if (fault := _fault(config, section)) is not None
    ]


def _fault(config: JobSections, section: AllowedLayoutSection) -> str | None:
    layout, home, num_gpus = section.layout(), config.layout(Role.ACTOR), _num_gpus(config)
    num_shards = config.actor.num_logical_shards
    if num_shards is not None and (layout.tp, layout.cp) != (home.tp, home.cp):
        return (
            f"tp={layout.tp} cp={layout.cp} is not the tp={home.tp} cp={home.cp} of actor.layout, and "
            f"actor.num_logical_shards={num_shards} keeps the bits of updates across dp, pp and vpp alone: give it "
            "that tp and cp, or leave num_logical_shards out"
        )
    if layout.num_ranks > num_gpus:
        return (
            f"layout {layout} has {layout.num_ranks} ranks, and the job has {num_gpus} GPUs in "
            "cluster.component_placement and actor.standby: lower an axis, or leave the layout out"
        )
    if section.dp is not None:
        return replicas_fault(layout, num_samples=samples_per_update(config), num_shards=num_shards)
    if not allowed_layouts([section], num_gpus=num_gpus, num_samples=samples_per_update(config), num_shards=num_shards):
        return (
            f"ep={layout.ep} divides dp * cp = dp * {layout.cp} for no dp that fits the minibatch and the job's "
            f"{num_gpus} GPUs: lower ep"
        )
    return None


def actor_layout_warnings(config: JobSections) -> list[str]:
    """Warn of a policy that never chooses one of these layouts."""
    scheduler = config.scheduler
    if not config.actor.layouts or (scheduler.moves_gpus and scheduler.policy != "rlinf"):
        return []
    why = "changes dp alone, as RLinf does" if scheduler.policy == "rlinf" else "leaves the actor in actor.layout"
    return [
        f"{KEY} has no effect under scheduler.policy={scheduler.policy}, which {why}: leave it out, or choose tide, "
        "dynarl, or static with collocated: true"
    ]


def _num_gpus(config: JobSections) -> int:
    """The GPUs that a policy could give to the actor."""
    return len({*config.standby(), *(gpu for role in Role for gpu in config.placement(role))})
