"""The base class of every config section, and the number types that sections share.

A section is frozen and refuses unknown keys. `fields_of` lists all keys of a config. Layer merging, the documentation
and the editors' schema use that list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

KeyPath = tuple[str | int, ...]
"""The names from the top of a config down to one key. A number is a place in a list."""
ITEM = "[]"
"""Stands for any place of a list in a key path of `fields_of`."""
OUTPUT_DIR = "jobs"
"""The folder of the jobs' folders where a config or a command names no other."""


@dataclass(frozen=True, slots=True)
class FileName:
    """Marks a text as the path of a file or folder. A relative path counts from the folder of the config file."""

    other_than: tuple[str, ...] = ()
    """Words with a meaning of their own. They are not paths."""


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
"""The most GPUs of a cluster: many times the largest cluster of a measured decision, and few enough to list at once."""
NumGpus = Annotated[int, Field(ge=1, le=MAX_GPUS)]
"""The number of GPUs of one node."""
Nodes = Annotated[dict[str, NumGpus], AfterValidator(_one_cluster)]
"""The number of GPUs by node: the value of `cluster.nodes` in configs and scenarios."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ConfigPath = Annotated[str, FileName()]
GpuList = Annotated[
    str, BeforeValidator(_number_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})
]
"""GPUs counted over the nodes in order: `0-3`, `0,2,5` or `4`. YAML reads the last one as a number."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section type in the annotation of a key: `Section`, `Section | None` or a list of sections.

    None: the key holds a plain value.
    """
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def fields_of(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every plain key below `section` with its path. The keys of sections themselves are left out."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield (*at, name), field
        else:
            is_list = get_origin(field.annotation) is tuple
            yield from fields_of(inner, (*at, name, ITEM) if is_list else (*at, name))
