"""The doctor's check of the disk. A folder that does not exist yet is on the disk of its nearest existing parent."""

from __future__ import annotations

from pathlib import Path

from cli.doctor import Health, disk, examine

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
