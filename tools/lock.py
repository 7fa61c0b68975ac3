"""Writes requirements/{base,data,dev}.txt: every package that the .in files need, at its installed version. With names
it writes those: `deploy` and `kubernetes`, which have environments of their own.

`make lock` installs the .in files and then runs this in each environment. The closure follows each package's own
requirements for this Python and platform. Each file has only the packages that the files before it lack. Versions lose
their local part (`2.13.0+cpu`), so that every index with the version can serve the lock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FOLDER = Path(__file__).resolve().parent.parent / "requirements"


def requirements_in(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Canonical name -> pin line of every package that the requirements need here. LookupError for a missing one."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(requirement, {""}) for requirement in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        name = canonicalize_name(requirement.name)
        visit = (name, frozenset(requirement.extras))
        if visit in seen or not applies(requirement, extras):
            continue
        seen.add(visit)
        try:
            found = distribution(name)
        except PackageNotFoundError as missing:
            raise LookupError(f"{name} is not installed: make lock installs what the .in files name") from missing
        pins[name] = f"{name}=={Version(found.version).public}"
        waiting += [(Requirement(line), set(requirement.extras)) for line in found.requires or ()]
    return pins


def main(names: Sequence[str]) -> int:
    known: dict[str, str] = {}
    for name in names or ("base", "data", "dev"):
        requirements = requirements_in((FOLDER / f"{name}.in").read_text())
        pins = {key: line for key, line in closure(requirements).items() if key not in known}
        known |= pins
        lines = [f"# Written by `make lock` from {name}.in; edit that.", *(pins[key] for key in sorted(pins))]
        (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")
        print(f"requirements/{name}.txt: {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
