"""Converts a policy's memory to JSON values under the policy's name, and back by the types of a registry. Pure.

Invariants:
- A memory is read back exactly as it was written. [test_memory_codec: comes_back_from_its_plain_form]
- Only registered types are written. [test_memory_codec: type_is_not_registered]
- Only registered types are read. [test_memory_codec: cannot_be_read_is_refused]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.scheduler.shell.codecs.plain import from_plain, to_plain
from services.scheduler.state.remembered import PolicyMemory


class MemoryCodec:
    """`types` are the memory types by the policies' names."""

    def __init__(self, types: Mapping[str, type[PolicyMemory]]) -> None:
        self._types = types

    def encode(self, memory: PolicyMemory | None) -> Any:
        """ValueError for a type that is not registered."""
        if memory is None:
            return None
        for policy, kind in self._types.items():
            if type(memory) is kind:
                return {policy: to_plain(memory)}
        raise ValueError(
            f"{type(memory).__name__} is no policy's memory (known: {self._known()}): add it to policy/registry.py"
        )

    def decode(self, plain: Any, where: str) -> PolicyMemory | None:
        """Inverse of `encode`; ValueError on anything else."""
        if plain is None:
            return None
        if not isinstance(plain, dict) or len(plain) != 1:
            raise ValueError(f"{where} must be null, or one policy's name with what it remembers")
        ((policy, fields),) = plain.items()
        kind = self._types.get(policy)
        if kind is None:
            raise ValueError(
                f"{where} is of the policy {policy!r}, which this code does not know (known: {self._known()}): use the "
                "code that wrote it, or add the policy to policy/registry.py"
            )
        memory: PolicyMemory = from_plain(kind, fields, f"{where}.{policy}")
        return memory

    def _known(self) -> str:
        return ", ".join(sorted(self._types))
