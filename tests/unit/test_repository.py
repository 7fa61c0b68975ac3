"""Rules for the repository as a whole that no linter checks: words, links, locks, imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

MACHINE_PATH = re.compile(r"(?<![\w.~}-])/(?:home|Users|root|work)/[\w.]")
REGISTRY_HOST = re.compile(
    r"\b(?:pypi|pythonhosted|npmjs|download\.pytorch|deb\.debian)\.(?:org|com)\b|[:]//\S+/simple\b"
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def repository_files() -> list[Path]:
    """Every file that is or would be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(ROOT / name for name in set(listed) if name and (ROOT / name).is_file())


def text_of(path: Path) -> str | None:
    """None for a binary file; UnicodeDecodeError for text that is not UTF-8."""
    content = path.read_bytes()
    return None if b"\0" in content else content.decode()


def places(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in repository_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def anchors(markdown: str) -> set[str]:
    """The fragments of a page's headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", FENCED.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_link(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False
    name, _, fragment = target.partition("#")
    linked = (page.parent / name).resolve() if name else page
    if not linked.exists():
        return True
    return bool(fragment) and linked.suffix == ".md" and fragment not in anchors(linked.read_text())


def requirement_lines(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_file_names_a_package_registrys_host() -> None:
    assert places(REGISTRY_HOST) == []


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page in repository_files():
        if page.suffix == ".md":
            targets = LINK.findall(INLINE_CODE.sub("", FENCED.sub("", page.read_text())))
            broken += [f"{page.relative_to(ROOT)} -> {target}" for target in targets if broken_link(page, target)]
    assert broken == []


@pytest.mark.parametrize("name", ["base", "data", "dev"])
def test_a_lock_pins_one_public_version_of_each_package_its_source_names(name: str) -> None:
    locked = requirement_lines(f"{name}.txt")
    loose = [str(pin) for pin in locked if not re.fullmatch(r"==[^+*,]+", str(pin.specifier))]
    assert loose == []
    pinned = {canonicalize_name(pin.name): pin.specifier for pin in locked}
    for wanted in requirement_lines(f"{name}.in"):
        version = str(pinned[canonicalize_name(wanted.name)]).removeprefix("==")
        assert wanted.specifier.contains(version, prereleases=True), f"{name}.in wants {wanted}, {name}.txt {version}"


@pytest.mark.parametrize(("name", "earlier"), [("data", ["base"]), ("dev", ["base", "data"])])
def test_a_lock_never_contradicts_those_before_it(name: str, earlier: list[str]) -> None:
    pinned = {canonicalize_name(pin.name) for before in earlier for pin in requirement_lines(f"{before}.txt")}
    assert [str(pin) for pin in requirement_lines(f"{name}.txt") if canonicalize_name(pin.name) in pinned] == []


def imported_modules(path: Path) -> set[str]:
    """Each module that the file imports, and each name that it imports, as `module.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names}
    return found


def test_no_file_imports_from_a_test_file() -> None:
    """Tests share helper modules, so that a test file may be changed without a look around."""
    files = [path.relative_to(ROOT) for path in repository_files() if path.suffix == ".py"]
    test_modules = {".".join(path.with_suffix("").parts) for path in files if path.name.startswith("test_")}
    stems = {name.rpartition(".")[2] for name in test_modules}
    imports = [
        f"{path} imports {name}"
        for path in files
        # To parse takes long, and who imports a module spells its name.
        if stems.intersection(re.findall(r"\btest_\w+", (ROOT / path).read_text()))
        for name in sorted(imported_modules(ROOT / path))
        if name in test_modules or name.rpartition(".")[0] in test_modules
    ]
    assert imports == []


PACKAGES = ("benchmarks", "cli", "services", "simulator", "tidegate")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking count too: a reader of one module of a circle has to read them all."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    order = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    # CycleError names the circle.
    order.prepare()


IMPORT_ALL = """
import importlib, multiprocessing, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
    started = [thread.name for thread in threading.enumerate()][1:] + multiprocessing.active_children()
    assert not started, f"importing {name} started {started}"
"""


def test_importing_any_module_starts_nothing() -> None:
    names = []
    for path in repository_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.suffix == ".py" and parts[0] in PACKAGES:
            names.append(".".join(part for part in parts if part != "__init__"))
    ran = subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == "", "importing printed something"
