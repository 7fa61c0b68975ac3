"""Gathers the wheels that a machine with its own torch lacks: `make wheels PY=3.12`.

`tools/offline.py` makes an environment of them on that machine, without a network. The versions are those of the locks.
These packages are not in the folder:
- torch, which comes with the machine, and what only torch needs;
- what downloads from Hugging Face, which nothing here does;
- transformers, which is large: the test that compares with it takes the machine's own, or is skipped.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
MOST_BYTES = 64 * 10**6
_OF_TORCH = frozenset({"torch", "triton", "mpmath", "networkx", "sympy"})
_OF_DOWNLOADS = frozenset(
    {"anyio", "click", "filelock", "fsspec", "h11", "hf-xet", "httpcore2", "httpx2", "huggingface-hub", "idna", "tqdm"}
    | {"truststore"}
)
LEFT_OUT = _OF_TORCH | _OF_DOWNLOADS
OF_TESTS = frozenset(
    {"hypothesis", "iniconfig", "pluggy", "pytest", "pytest-asyncio", "pytest-timeout", "sortedcontainers"}
)
"""What the tests marked `gpu` need of the development packages."""
WITHOUT_WHEEL = frozenset({"nkeys"})
"""The index has only the source of these. They are pure Python, so a wheel that is made here fits every Python."""
_GLIBC_MINORS = range(5, 36)
"""pip takes a platform by its exact name. Up to 2.35, the glibc of Ubuntu 22.04."""


class NotGathered(RuntimeError):
    """The folder is not complete, or too large to carry."""


def pins(lock: str) -> dict[str, str]:
    """Name -> pin, of the lock's lines."""
    lines = (line.split("#")[0].strip() for line in lock.splitlines())
    return {line.partition("==")[0]: line for line in lines if line}


def wanted() -> dict[str, str]:
    """The pins of all wheels in the folder, by name. pip itself has none: any version installs the others."""
    base, dev, megatron = (pins((REQUIREMENTS / f"{name}.txt").read_text()) for name in ("base", "dev", "megatron"))
    if missing := (LEFT_OUT - base.keys()) | (OF_TESTS - dev.keys()):
        raise NotGathered(f"the locks have no {', '.join(sorted(missing))}: mend the lists of tools/wheels.py")
    of_job = {name: pin for name, pin in base.items() if name not in LEFT_OUT}
    return {**of_job, **megatron, **{name: dev[name] for name in OF_TESTS}, "pip": "pip"}


def gather(python: str, folder: Path, pip_options: list[str]) -> int:
    """Fill the folder. Returns its bytes. Raises NotGathered."""
    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.glob("*.whl"):
        former.unlink()
    want = wanted()
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
    platforms += [f"{name}_{machine}" for name in ("manylinux1", "manylinux2010", "manylinux2014")]
    # megatron-core's metadata refuses Python 3.11, on which its code runs.
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", "--ignore-requires-python"]
    target += [option for name in platforms for option in ("--platform", name)]
    ready = sorted(pin for name, pin in want.items() if name not in WITHOUT_WHEEL)
    _pip(["download", "--dest", str(folder), *target, *pip_options, *ready])
    _pip(["wheel", "--wheel-dir", str(folder), *pip_options, *sorted(want[name] for name in WITHOUT_WHEEL)])
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != len(want):
        raise NotGathered(f"{folder} has {len(wheels)} wheels for {len(want)} packages: empty it and gather again")
    for name in WITHOUT_WHEEL:
        if not list(folder.glob(f"{name}-*-none-any.whl")):
            raise NotGathered(f"the wheel of {name} is for this Python alone: it is not pure Python any more")
    size_bytes = sum(wheel.stat().st_size for wheel in wheels)
    if size_bytes > MOST_BYTES:
        raise NotGathered(f"{folder} has {size_bytes / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}: leave some out")
    return size_bytes


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments, "--no-deps"]
    if subprocess.run(command, check=False).returncode:
        raise NotGathered(f"pip {arguments[0]} failed; its message is above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description="Gathers wheels for another machine.")
    parser.add_argument("--python", choices=PYTHONS, required=True, help="the Python of that machine")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    options, pip_options = parser.parse_known_args()
    try:
        size_bytes = gather(options.python, options.into, pip_options)
    except NotGathered as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    print(f"wheels: {options.into} has {size_bytes / 1e6:.1f} MB for Python {options.python}")
    print(f"wheels: copy it with this repository to the machine, and there: make gpu WHEELS={options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
