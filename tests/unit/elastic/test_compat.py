"""What the adapter of Megatron's optimizers patches."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer

from tidegate.elastic.model.compat import gathering_within


def test_only_one_name_of_one_module_is_patched_and_only_inside_the_context() -> None:
    group: Any = cast("torch.distributed.ProcessGroup", None)
    before, distributed = vars(torch).copy(), vars(torch.distributed).copy()

    with gathering_within(group, device=torch.device("cpu")):
        patched: Any = megatron_optimizer.torch
        assert patched is not torch
        assert patched.zeros is torch.zeros
        assert patched.distributed.all_reduce is torch.distributed.all_reduce
        assert (vars(torch), vars(torch.distributed)) == (before, distributed)

    assert megatron_optimizer.torch is torch
    with pytest.raises(KeyError), gathering_within(group, device=torch.device("cpu")):
        raise KeyError
    assert megatron_optimizer.torch is torch
