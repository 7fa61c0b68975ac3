"""On a CPU the launcher makes SGLang's imports work, and a missing kernel raises an error when it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import services.rollout.sglang.cpu.launch as launcher

HELPED = f"""
import runpy
runpy.run_path({str(Path(launcher.__file__))!r}, run_name="__mp_main__")
import torch
from sgl_kernel.scalar_type import scalar_types
from sgl_kernel import rmsnorm
import sgl_kernel.flash_attn
scalar_types.uint4b8
print(torch.ops.torchvision.nms.default)
for call in (rmsnorm, sgl_kernel.flash_attn.flash_attn_varlen_func):
    try:
        call(1, out=2)
    except NotImplementedError as error:
        print(error)
"""


def test_names_of_the_stub_import_and_their_calls_raise() -> None:
    ran = subprocess.run([sys.executable, "-c", HELPED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "torchvision.nms.default"
    assert [line.split()[0] for line in lines[1:]] == [
        "sgl_kernel.rmsnorm",
        "sgl_kernel.flash_attn.flash_attn_varlen_func",
    ]
    assert all("is a CUDA kernel" in line for line in lines[1:])


def test_importing_the_launcher_changes_no_import() -> None:
    assert not any(type(finder).__module__ == launcher.__name__ for finder in sys.meta_path)
