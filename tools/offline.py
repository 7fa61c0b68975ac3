"""Makes an environment on a machine without a network: `PYTHON tools/offline.py ENVIRONMENT WHEELS`.

PYTHON is the machine's own interpreter, which has torch. The environment sees its packages, and the wheels of
`make wheels` come before them. Nothing of the interpreter changes, and nothing else is installed. An environment
of the same interpreter and wheels stays as it is; any other is made anew.

This file imports the standard library alone. pip runs from its own wheel, so the interpreter needs neither pip nor
ensurepip.
"""

from __future__ import annotations

import json
import re
import site
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 13))
"""The first and the last version with which Tidegate was written to run."""
RECORD = "made_of.json"
"""The file in an environment that says of what it was made. It is written last, so a half-made one has none."""


class CannotInstall(RuntimeError):
    """This interpreter or these wheels do not make an environment. The message says what to do."""


def check_interpreter(python: tuple[int, int], torch: str | None) -> None:
    """Raises CannotInstall for a Python or torch of another version."""
    first, last = PYTHONS
    if not first <= python <= last:
        raise CannotInstall(f"Python {_dotted(python)} is not within {_dotted(first)} to {_dotted(last)}: give PYTHON=")
    if torch is None:
        raise CannotInstall("this interpreter has no torch: name the one that has, make gpu WHEELS=... PYTHON=...")
    found = re.match(r"(\d+)\.(\d+)", torch)
    first, last = TORCHES
    if found is None or not first <= (int(found[1]), int(found[2])) <= last:
        raise CannotInstall(f"torch {torch} is not within {_dotted(first)} to {_dotted(last)}")


def wheels_in(folder: Path, python: tuple[int, int]) -> tuple[Path, list[Path]]:
    """pip's wheel, and all others. Raises CannotInstall where they are missing or for another Python."""
    wheels = sorted(folder.resolve().glob("*.whl"))
    pips = [wheel for wheel in wheels if wheel.name.startswith("pip-")]
    if len(wheels) == len(pips) or not pips:
        raise CannotInstall(f"{folder} has no wheels: make wheels PY={_dotted(python)} gathers them where a network is")
    own = f"cp{python[0]}{python[1]}"
    tags = {wheel.name.split("-")[2] for wheel in wheels if "-abi3-" not in wheel.name}
    others = sorted(tag for tag in tags if tag.startswith("cp") and tag != own)
    if others:
        raise CannotInstall(f"{folder} has wheels for {others[0]}, and this is {own}: make wheels PY={_dotted(python)}")
    return pips[0], [wheel for wheel in wheels if wheel not in pips]


def is_made_of(folder: Path, parts: dict[str, object]) -> bool:
    """Whether the environment is whole, and of this interpreter and these wheels."""
    record = folder / RECORD
    return record.is_file() and json.loads(record.read_text()) == parts


def make_environment(folder: Path, wheels: Path) -> None:
    """Raises CannotInstall, also where the environment is there already."""
    python = sys.version_info[:2]
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    check_interpreter(python, torch)
    pip, others = wheels_in(wheels, python)
    parts: dict[str, object] = {
        "interpreter": sys.executable,
        "python": sys.version,
        "wheels": [wheel.name for wheel in (pip, *others)],
    }
    if is_made_of(folder, parts):
        return
    print(f"make: making {folder} of {len(others)} wheels and {sys.executable}", file=sys.stderr)
    venv.EnvBuilder(system_site_packages=True, with_pip=False, clear=True, symlinks=True).create(folder)
    own = folder.resolve() / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder.resolve())}))
    # An environment of an environment sees the base interpreter's packages only.
    inherited = [] if sys.prefix == sys.base_prefix else site.getsitepackages()
    (packages / "interpreter.pth").write_text("".join(f"{path}\n" for path in inherited))
    install = [
        str(own),
        str(pip / "pip"),
        "install",
        "--disable-pip-version-check",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    # Without this pip would leave out what the interpreter has already, in another version.
    subprocess.run([*install, "--ignore-installed", "--ignore-requires-python", *map(str, others)], check=True)
    subprocess.run([*install, "--no-build-isolation", "--editable", str(ROOT)], check=True)
    (folder / RECORD).write_text(json.dumps(parts, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python tools/offline.py ENVIRONMENT WHEELS", file=sys.stderr)
        return 2
    try:
        make_environment(Path(arguments[0]), Path(arguments[1]))
    except CannotInstall as error:
        print(f"make: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
