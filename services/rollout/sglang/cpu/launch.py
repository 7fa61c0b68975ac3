"""Starts SGLang's server on a CPU, in SGLang's own environment. It only makes imports work, and replaces no kernel.

PyPI has two packages that SGLang imports only as CUDA builds:
- torchvision registers kernels for operators that its CUDA library would declare. This module declares their schemas.
- `sgl_kernel` holds CUDA libraries. A stub replaces it: its names can be imported, its functions raise
  NotImplementedError.

SGLang spawns children, which import this file again as `__mp_main__` and thus get the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import torch

STUBBED = "sgl_kernel"


class _Absent:
    """A name in the stub. Its attributes are absent names too, and a call raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(f"{self._name} has no attribute {name!r}")
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a CUDA kernel; this SGLang runs on a CPU without it")


class _Stub(ModuleType):
    """A package in which every name is absent."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _Absent(f"{self.__name__}.{name}")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != STUBBED and not fullname.startswith(STUBBED + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The stub has no content."""


def help_imports() -> torch.library.Library:
    """Make SGLang's imports work. The schemas last as long as the returned library."""
    sys.meta_path.insert(0, _StubFinder())
    vision = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call] # torch has no types for it
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        vision.define(schema)  # type: ignore[no-untyped-call] # nor for this
    return vision


def main(arguments: Sequence[str]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(list(arguments)))


if __name__ in ("__main__", "__mp_main__"):
    schemas = help_imports()
if __name__ == "__main__":
    main(sys.argv[1:])
