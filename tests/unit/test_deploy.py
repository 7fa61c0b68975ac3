"""The systemd unit of an agent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.command import _parse, _parser

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "tidegate-agent@.service"


def test_the_unit_starts_an_agent_as_the_command_takes_it() -> None:
    (command,) = re.findall(r"^ExecStart=/opt/tidegate/bin/tidegate (.*)$", UNIT.read_text(), re.MULTILINE)
    args = _parse(_parser(), command.replace("${LISTEN}", "10.0.0.8:7400").split())
    assert (args.command, args.listen, args.credentials) == ("agent", "10.0.0.8:7400", Path("/etc/tidegate/node"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="it needs systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit_but_a_program_that_is_not_installed_here(tmp_path: Path) -> None:
    unit = tmp_path / "tidegate-agent@root.service"
    unit.write_text(UNIT.read_text().replace("/opt/tidegate/bin/tidegate", "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", unit], stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
