"""Lets megatron-core 0.19.2 run without CUDA: the CPU answers the few names that Megatron takes from torch.cuda.

The program calls `install()` once per process, before anything else imports megatron. Where CUDA is present it does
nothing and returns False. Each patch names the upstream line (in megatron/core) that needs it.

Invariants:
- Nothing is patched on import.
- A second call changes nothing.
- Calls that do not name CUDA behave as before.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_FACTORIES = ("zeros", "ones", "tensor")
"""pipeline_parallel/schedules.py:749, 1121, 2292; optimizer/clip_grads.py:96-112, 180; transformer/utils.py:39.

Also pinned memory, which only CUDA has: models/common/embeddings/rope_utils.py:62.
"""

_TYPE_NAMES = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}
"""optimizer/distrib_optimizer.py:401, 466, 758; optimizer/clip_grads.py:174 compare with these type names."""

_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
"""transformer/moe/paged_stash.py:12 imports these kernels, the only ones without a guard. They need Triton, which CPU
builds of torch do not bring, and nothing on a CPU runs them."""


class _IdleStream:
    """distributed/param_and_grad_buffer.py:632 waits on a stream. On a CPU all work is already done."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def install(cuda_is_available: Callable[[], bool] = torch.cuda.is_available) -> bool:
    """Install the stand-in and return True. Where CUDA is present, change nothing and return False."""
    if cuda_is_available():
        return False
    if torch.cuda.current_device.__module__ == __name__:
        return True
    if not _has_triton():
        sys.modules.setdefault(_KERNELS, _kernels_without_triton())
    for owner, name, stand_in in _replacements():
        setattr(owner, name, stand_in)
    # Import the module only now: it takes names from torch.cuda at its import.
    from megatron.core.tensor_parallel import random as megatron_random

    # tensor_parallel/random.py:135 sets the state through CUDA's default generators, which a CPU build does not have.
    megatron_random._set_cuda_rng_state = _set_cpu_rng_state
    return True


def _has_triton() -> bool:
    return "triton" in sys.modules or importlib.util.find_spec("triton") is not None


def _kernels_without_triton() -> ModuleType:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a Triton kernel was called on a CPU")

    kernels = ModuleType(_KERNELS)
    vars(kernels).update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=refuse, paged_stash_pop_kernel=refuse)
    return kernels


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, stand-in) of each name of torch's that megatron-core expects."""
    return [
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        # optimizer/*.py compare `param.type()` with the names of CUDA's tensor types.
        (torch.Tensor, "type", _type_as_on_cuda(torch.Tensor.type)),
        # models/common/language_module/language_module.py:307 moves a tied embedding to the device.
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        # tensor_parallel/{layers,mappings}.py, pipeline_parallel/p2p_communication.py:211-342 and
        # distributed/param_and_grad_buffer.py:1162-1186: `device=torch.cuda.current_device()`.
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        # pipeline_parallel/p2p_communication.py:263, 419; parallel_state.py:216.
        (torch.cuda, "synchronize", lambda device=None: None),
        # distributed/param_and_grad_buffer.py:632.
        (torch.cuda, "current_stream", lambda device=None: _IdleStream()),
        # tensor_parallel/random.py:118, 303-306, 490: the tracker's states are those of the CPU's generator.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (torch.cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
    ]


def _set_cpu_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made_on_cpu


def _type_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def named_or_cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        return _TYPE_NAMES.get(answer, answer) if isinstance(answer, str) else answer

    return named_or_cast
