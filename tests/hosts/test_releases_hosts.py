"""A job over two machines (`tests/two_machines.py`) that take a release of other code while it runs.

Both releases are wheels of this source tree, each in an environment of its own. In the newer one modules have other
names, and configs another key: a process of the running job that got the newer code would not start.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.trained import assert_all_was_trained_once, summary_of
from tests.two_machines import Lab, two_machines

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

ITERATIONS = 80
"""Long enough for two reloads and four deaths."""
LOOK_AGAIN_S = 0.1
RENAMED = {
    "services/rollout/worker.py": "services/rollout/engine_rank.py",
    "services/inference/scorer.py": "services/inference/scoring_rank.py",
    "tidegate/runtime/local_worker.py": "tidegate/runtime/near_worker.py",
}
KEY_BEFORE = "    collective_timeout_s: PositiveFloat = 60.0\n"
# Once each, on both machines, and a service of each kind: workers come from fork servers, and services from agents.
DEATHS = ("one rollout n0/2", "one rollout n1/2", "services.rollout .*/one/.*--node n1", "services.scheduler .*/one/")


def source(to: Path) -> Path:
    for name in ("cli", "services", "simulator", "tidegate", "requirements"):
        shutil.copytree(REPOSITORY / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, to)
    return to


def newer(tree: Path) -> Path:
    """The same tree, of another code."""
    for old, new in RENAMED.items():
        (tree / old).rename(tree / new)
    dotted = {path.removesuffix(".py").replace("/", "."): path for path in RENAMED}
    names = re.compile("|".join(map(re.escape, dotted)))
    num_changed = 0
    for path in (each for each in tree.rglob("*.py") if not each.name.endswith("_pb2.py")):
        text = path.read_text()
        changed = names.sub(lambda found: RENAMED[dotted[found[0]]].removesuffix(".py").replace("/", "."), text)
        changed = changed.replace(KEY_BEFORE, f"{KEY_BEFORE}    of_the_newer_release: Positive = 3\n")
        num_changed += changed != text
        path.write_text(changed)
    assert num_changed > len(RENAMED)
    return tree


def installed(tree: Path, to: Path) -> Path:
    """The environment of a release. What Tidegate needs it takes from this one."""
    venv.create(to)
    packages = next(to.glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    pip, quiet = (sys.executable, "-m", "pip"), ("--quiet", "--no-deps")
    subprocess.run([*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", to, tree], check=True)
    wheel = next(to.glob("tidegate-*.whl"))
    subprocess.run([*pip, "--python", to / "bin" / "python", "install", *quiet, "--no-index", wheel], check=True)
    return to


def found(words: str) -> dict[psutil.Process, list[str]]:
    """The processes whose command lines, or titles, have these words, and their command lines."""
    every = {each: each.info for each in psutil.process_iter(["cmdline", "status"])}
    alive = {each: info["cmdline"] or [] for each, info in every.items() if info["status"] != psutil.STATUS_ZOMBIE}
    return {each: cmdline for each, cmdline in alive.items() if re.search(words, " ".join(cmdline))}


def killed_and_back(words: str) -> None:
    (before,) = found(words)
    before.kill()
    while before in (now := found(words)) or not now:
        time.sleep(LOOK_AGAIN_S)


def pythons_of(job: str) -> set[str]:
    """The interpreters of its processes, but for workers, which have titles."""
    return {cmdline[0] for cmdline in found(f"/{job}[./].*json").values() if cmdline[0].endswith("python")}


def here(lab: Lab) -> None:
    assert "its jobs run on" in lab.typed("reload", "--output-dir", str(lab.jobs))


def there(lab: Lab) -> None:
    lab.typed("reload", "--agent", str(lab.agents[-1].pid))


@pytest.mark.parametrize("order", [(here, there), (there, here)], ids=["the keeper first", "the other machine first"])
def test_machines_take_other_code_and_a_job_runs_on_with_its_own(
    link: None, tmp_path: Path, order: tuple[Callable[[Lab], None], ...]
) -> None:
    old = installed(source(tmp_path / "tree-1"), tmp_path / "release-1")
    new = installed(newer(source(tmp_path / "tree-2")), tmp_path / "release-2")
    current = tmp_path / "current"
    current.symlink_to(old)
    (tmp_path / "lab").mkdir()
    with two_machines(tmp_path / "lab", str(current / "bin" / "tidegate")) as lab, lab.cluster("n0=4", "n1=4@b"):
        for job in ("one", "two"):
            lab.submit(small_job(job, algorithm__iterations=ITERATIONS))
        while not any((lab.jobs / "one" / "checkpoints").glob("*/manifest.json")):
            time.sleep(LOOK_AGAIN_S)
        assert pythons_of("one") == {f"{old}/bin/python"}
        (tmp_path / "next").symlink_to(new)
        (tmp_path / "next").rename(current)
        for take in order:
            take(lab)
        for words in DEATHS:
            killed_and_back(words)
        assert pythons_of("one") == {f"{old}/bin/python"}
        while not pythons_of("two"):
            time.sleep(LOOK_AGAIN_S)
        assert pythons_of("two") == {f"{new}/bin/python"}
        rows = lab.tidegate("wait", "one", "two")
        assert {(row["job"], row["state"], row["starts"]) for row in rows} == {
            ("one", "finished", 1),
            ("two", "finished", 1),
        }
    want = summary_of(lab.jobs / "two")["weights_checksum"]
    for job in ("one", "two"):
        folder = lab.jobs / job
        assert_all_was_trained_once(folder, summary_of(folder), want, iterations=ITERATIONS)
