"""The tunable for large copies is added to those that a person has set."""

from __future__ import annotations

import subprocess

import pytest

from tidegate.runtime.large_copies import with_large_copies

OURS = "glibc.cpu.x86_non_temporal_threshold=0x100000"


@pytest.mark.parametrize(
    ("present", "want"),
    [
        ("", OURS),
        ("glibc.malloc.check=1", f"glibc.malloc.check=1:{OURS}"),
        ("glibc.cpu.x86_non_temporal_threshold=0x800000", "glibc.cpu.x86_non_temporal_threshold=0x800000"),
    ],
    ids=["none", "another", "the same"],
)
def test_what_a_person_has_set_stays(present: str, want: str) -> None:
    environment = {"GLIBC_TUNABLES": present} if present else {}
    assert with_large_copies(environment) == {"GLIBC_TUNABLES": want}


def test_a_program_starts_with_it_and_prints_nothing_else() -> None:
    ran = subprocess.run(["/bin/echo", "here"], env=with_large_copies({}), capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("here\n", "")
