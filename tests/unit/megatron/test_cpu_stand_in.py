"""The stand-in changes nothing where CUDA is present, nor on import. tests/integration/megatron checks its answers."""

from __future__ import annotations

import subprocess
import sys

import torch

from tidegate.megatron import cpu_stand_in


def test_the_stand_in_changes_nothing_where_cuda_is_present() -> None:
    before = _patched_names()
    assert not cpu_stand_in.install(cuda_is_available=lambda: True)
    assert _patched_names() == before


def test_the_import_of_the_stand_in_patches_nothing() -> None:
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_megatron_imports_without_triton_which_cpu_builds_of_torch_lack() -> None:
    program = """
import sys
from importlib.abc import MetaPathFinder

class NoTriton(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name, name=name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
sys.meta_path.insert(0, NoTriton())
from tidegate.megatron import cpu_stand_in
assert cpu_stand_in.install(cuda_is_available=lambda: False)
from megatron.core.transformer.moe import paged_stash
assert "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _patched_names() -> list[object]:
    return [
        torch.zeros,
        torch.ones,
        torch.tensor,
        torch.Tensor.type,
        torch.Tensor.cuda,
        torch.cuda.current_device,
        torch.cuda.synchronize,
        torch.cuda.current_stream,
        torch.cuda.manual_seed,
        torch.cuda.get_rng_state,
        torch.cuda.random.get_rng_state,
    ]
