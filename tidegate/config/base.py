"""What every section of the config is made of: frozen, without unknown keys, and the ranges that numbers share.

`fields_of` lists the keys of a config and of its sections, for whatever goes through all of them: merging layers,
documentation, the editors' schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

KeyPath = tuple[str | int, ...]
"""A key of a config from the top down; a number is a place in a list."""
ITEM = "[]"
"""In a key path of `fields_of`: any place of a list."""


@dataclass(frozen=True, slots=True)
class FileName:
    """Marks a text as the path of a file or folder, relative to the folder of the config that gives it."""

    other_than: tuple[str, ...] = ()
    """Words that are no paths."""


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _one_cluster(nodes: dict[str, int]) -> dict[str, int]:
    if not nodes:
        raise ValueError("cluster.nodes has no node: name one with its GPUs, such as {n0: 8}")
    for name in nodes:
        if not name or "/" in name:
            raise ValueError(f"cluster.nodes names a node {name!r}: give it a name without '/', such as n0")
    if (num_gpus := sum(nodes.values())) > MAX_GPUS:
        raise ValueError(
            f"cluster.nodes has {num_gpus:,} GPUs on {len(nodes):,} nodes, and a cluster at most {MAX_GPUS:,}: "
            "name fewer nodes, or fewer GPUs of each"
        )
    return nodes


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
MAX_GPUS = 65_536
"""Of a cluster: many times the largest that a decision was measured on, and few enough to be listed at once."""
NumGpus = Annotated[int, Field(ge=1, le=MAX_GPUS)]
"""Of a node."""
Nodes = Annotated[dict[str, NumGpus], AfterValidator(_one_cluster)]
"""GPUs by node, as `cluster.nodes` has them in configs and scenarios."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ConfigPath = Annotated[str, FileName()]
GpuList = Annotated[
    str, BeforeValidator(_number_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})
]
"""GPUs counted over the nodes in order: `0-3`, `0,2,5`, and `4`, which YAML reads as a number."""


class Section(BaseModel):
    """Of the config."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a key holds: itself, none at times (`Section | None`), or a list of them; None for a value."""
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def fields_of(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key below `section` with its path, sections themselves left out."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield (*at, name), field
        else:
            is_list = get_origin(field.annotation) is tuple
            yield from fields_of(inner, (*at, name, ITEM) if is_list else (*at, name))
