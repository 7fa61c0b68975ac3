"""The answer of torch about this machine's devices, asked once: each question starts a process that imports torch."""

from __future__ import annotations

import pytest

from tidegate.runtime import cuda


@pytest.fixture(scope="session")
def devices_or_why() -> list[cuda.CudaDevice] | cuda.NoCuda:
    try:
        return cuda.cuda_devices()
    except cuda.NoCuda as none:
        return none


@pytest.fixture
def torch_is_asked_once(devices_or_why: list[cuda.CudaDevice] | cuda.NoCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later questions of the doctor and of a job's start get the first answer."""

    def answer() -> list[cuda.CudaDevice]:
        if isinstance(devices_or_why, cuda.NoCuda):
            raise cuda.NoCuda(*devices_or_why.args)
        return devices_or_why

    for module in ("tidegate.runtime.cuda", "cli.doctor"):
        monkeypatch.setattr(f"{module}.cuda_devices", answer)
