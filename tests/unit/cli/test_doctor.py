"""The doctor's check of the disk. A folder that does not exist yet is on the disk of its nearest existing parent."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.doctor import Health, disk, examine, gpus

MORE_THAN_ANY_DISK = 2**80


def test_too_little_disk_for_the_streams_gives_a_warning_with_the_remedy(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "yet", least_bytes=MORE_THAN_ANY_DISK)
    assert found.health is Health.WARN
    assert "which the streams of a job reserve" in found.remedy
    assert "name another --output-dir" in found.remedy


def test_enough_disk_needs_no_remedy(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "yet", least_bytes=0)
    assert (found.health, found.remedy) == (Health.OK, "")


def test_the_disk_examined_is_that_of_the_output_folder(tmp_path: Path) -> None:
    checks = [finding.check for finding in examine(output_dir=tmp_path / "elsewhere")]
    assert f"disk of {tmp_path / 'elsewhere'}" in checks


@pytest.mark.parametrize(
    ("devices", "want", "want_found"),
    [
        ([], Health.OK, "none that torch can use: jobs run on CPU slots"),
        (["H200 of 140 GiB"], Health.WARN, "1: H200 of 140 GiB"),
        (["H200 of 140 GiB"] * 2, Health.WARN, "2: H200 of 140 GiB"),
        (["H200 of 140 GiB"] * 3, Health.OK, "3: H200 of 140 GiB"),
    ],
    ids=["none", "one", "too few for a job's components", "one for each component"],
)
def test_fewer_gpus_than_components_give_a_warning_that_shared_ones_are_for_trials(
    devices: list[str], want: Health, want_found: str
) -> None:
    found = gpus(devices)
    assert (found.health, found.found) == (want, want_found)
    assert ("set cluster.slots_per_gpu" in found.remedy) == (want is Health.WARN)
    assert found.remedy.endswith("for trials, not for speed") == (want is Health.WARN)
