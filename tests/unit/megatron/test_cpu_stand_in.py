"""The stand-in changes nothing where CUDA is present, nor on import. tests/integration/megatron checks its answers."""

from __future__ import annotations

import torch

from tidegate.megatron import cpu_stand_in


def test_the_stand_in_changes_nothing_where_cuda_is_present() -> None:
    before = _patched_names()
    assert not cpu_stand_in.install(cuda_is_available=lambda: True)
    assert _patched_names() == before


def test_the_import_of_the_stand_in_patches_nothing() -> None:
    assert torch.cuda.current_device.__module__ == "torch.cuda"


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
