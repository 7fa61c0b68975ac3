"""Lists of GPUs in configs and scenarios, such as `0-3,6`. GPUs are counted over the nodes from 0.

Invariants:
- A list never has more GPUs than a cluster may have, whatever ranges it names.
  [test_gpu_lists: more_than_a_cluster_together_are_refused]
- The faults of one list are one short line, however many GPUs they concern. [test_gpu_lists: beyond_are_one_line]
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence

from tidegate.config.base import MAX_GPUS


def gpu_indices(text: str) -> list[int]:
    """`0-3,6` -> [0, 1, 2, 3, 6]. ValueError: the text is no such list."""
    indices, shown = list[int](), _shortened(text)
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not _is_index(first) or (dash and not _is_index(last)):
            raise ValueError(f"{shown} is not a list of GPUs like '0-3' or '0,2,5', each below {MAX_GPUS:,}")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ValueError(f"{shown} holds the range {low}-{high}, which runs backwards")
        if len(indices) + high + 1 - low > MAX_GPUS:
            raise ValueError(
                f"{shown} names more GPUs than the {MAX_GPUS:,} that a cluster may have: the ranges up to {low}-{high} "
                f"are {len(indices) + high + 1 - low:,} together; name each GPU once"
            )
        indices.extend(range(low, high + 1))
    return indices


def gpu_list(indices: Collection[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index <= parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def list_fault(key: str, indices: Sequence[int], *, own: str, num_gpus: int, holder: Mapping[int, str]) -> str | None:
    """The faults of the GPUs that `key` names for the component `own`, as one line. None: there is no fault.

    `holder` maps each GPU of another component to that component.
    """
    beyond: list[int] = []
    held: dict[str, list[int]] = {}
    seen: set[int] = set()
    for index in indices:
        if index >= num_gpus:
            beyond.append(index)
        elif index in holder or index in seen:
            held.setdefault(holder.get(index, own), []).append(index)
        seen.add(index)
    twice = ", ".join(f"{_named(found)}, which {name} has already" for name, found in held.items())
    faults = [f"{twice}: list each GPU once"] if twice else []
    if beyond:
        faults.append(f"{_named(beyond)}, the cluster has {num_gpus} (0-{num_gpus - 1})")
    return f"{key} names {'; '.join(faults)}" if faults else None


def _named(indices: Collection[int]) -> str:
    return f"GPU{'s' if len({*indices}) > 1 else ''} {gpu_list(indices)}"


def _shortened(text: str) -> str:
    short = reprlib.Repr()
    short.maxstring = 80
    return short.repr(text)


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= len(str(MAX_GPUS)) and int(word) < MAX_GPUS
