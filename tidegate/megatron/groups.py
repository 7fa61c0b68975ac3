"""Megatron's process groups of a mesh, made from a World's cache instead of `parallel_state`.

- Each role is a set of axes. Its groups are the ranks that agree in all other axes, in mesh order.
- Dense parameters see (tp, cp, dp, stage), expert parameters (tp, ep, rest, stage).
- The embedding groups are the first and last rank of each pipeline, and the first rank alone.
- Generalised tensor parallelism has size 1, so its variants are the plain groups.
- There is one distributed optimizer instance: the whole mesh.

Invariants:
- A member gets exactly the groups that it is in; None for an embedding group that it is not in.
- For a mesh over ranks 0, 1, ... these are the groups that `parallel_state` makes.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from tidegate.elastic.epoch.world import World
from tidegate.elastic.plan.layout import Mesh

_DENSE_ROLES: dict[str, frozenset[str]] = {
    "tp": frozenset({"tp"}),
    "pp": frozenset({"stage"}),
    "mp": frozenset({"tp", "stage"}),
    "cp": frozenset({"cp"}),
    "tp_cp": frozenset({"tp", "cp"}),
    "dp": frozenset({"dp"}),
    "dp_cp": frozenset({"dp", "cp"}),
    "tp_dp_cp": frozenset({"tp", "dp", "cp"}),
    "intra_dist_opt": frozenset({"tp", "dp", "cp", "stage"}),
    "gtp_remat": frozenset(),
}
_EXPERT_ROLES: dict[str, frozenset[str]] = {
    "ep": frozenset({"ep"}),
    "expt_tp": frozenset({"tp"}),
    "tp_ep": frozenset({"tp", "ep"}),
    "tp_ep_pp": frozenset({"tp", "ep", "stage"}),
    "expt_dp": frozenset({"rest"}),
    "expt_gtp_remat": frozenset(),
}
_SAME_GROUP = {
    "dp_cp_gtp_remat": "dp_cp",
    "intra_dp_cp": "dp_cp",
    "expt_dp_gtp_remat": "expt_dp",
    "intra_expt_dp": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
"""Roles that differ from another only under generalised tensor parallelism or with several optimizer instances."""


def groups_of(mesh: Mesh) -> dict[int, dict[str, tuple[int, ...]]]:
    """The groups of each member, by role."""
    groups: dict[int, dict[str, tuple[int, ...]]] = {member: {} for member in mesh.ranks}
    for role, members in _roles(mesh):
        for member in members:
            groups[member][role] = members
    return groups


def megatron_groups(world: World, mesh: Mesh) -> ProcessGroupCollection | None:
    """This member's collection; None for a member outside the mesh. Raises PeerLost when a peer does not take part.

    It prepares groups that are not prepared yet, so every member of the world must call it.
    """
    groups = groups_of(mesh)
    all_groups = {group for roles in groups.values() for group in roles.values()}
    if not world.is_prepared(all_groups):
        world.prepare(all_groups)
    if world.me not in groups:
        return None
    made = {role: world.group(group) for role, group in groups[world.me].items()}
    same = {role: made[other] for role, other in _SAME_GROUP.items()}
    absent = dict.fromkeys({"embd", "pos_embd", "inter_dist_opt", "hcp", "dp_cp_ag", "expt_dp_ag"} - made.keys())
    return ProcessGroupCollection(**made, **same, **absent)


def prepare_megatron(groups: ProcessGroupCollection, *, seed: int) -> None:
    """Set up the globals that Megatron reads even where it gets groups: its scratch memory and its RNG tracker."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank()
    )


def _roles(mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    places = [mesh.coordinates(index) for index in range(len(mesh.ranks))]
    dense = [{"tp": at.tp, "cp": at.cp, "dp": at.dp, "stage": at.stage} for at in places]
    expert = [
        {"tp": at.tp, "ep": at.ep, "rest": (at.dp * mesh.layout.cp + at.cp) // mesh.layout.ep, "stage": at.stage}
        for at in places
    ]
    for table, coordinates in ((_DENSE_ROLES, dense), (_EXPERT_ROLES, expert)):
        for role, axes in table.items():
            for members in _agreeing(mesh.ranks, coordinates, axes):
                yield role, members
    for pipeline in _agreeing(mesh.ranks, dense, _DENSE_ROLES["pp"]):
        yield "embd", pipeline[:1] if len(pipeline) == 1 else (pipeline[0], pipeline[-1])
        yield "pos_embd", pipeline[:1]


def _agreeing(
    ranks: tuple[int, ...], coordinates: list[dict[str, int]], axes: frozenset[str]
) -> Iterator[tuple[int, ...]]:
    """The ranks that agree in all axes but these, group by group, in mesh order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(ranks, coordinates, strict=True):
        groups.setdefault(tuple(at for axis, at in place.items() if axis not in axes), []).append(rank)
    return map(tuple, groups.values())
