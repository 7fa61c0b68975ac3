"""`tidegate certs`: a person makes an authority, issues a credential, sees it, and revokes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from tidegate.certs.authority import Credential


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["certs", *words]) == 0
    return capsys.readouterr().out


def test_a_credential_from_its_authority_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca, to = ("--authority", str(tmp_path / "ca")), tmp_path / "n0"
    assert "whoever has ca.key is everybody" in answer(capsys, "init", *ca, "--cluster", "lab")
    told = answer(capsys, "issue", "node", "n0", *ca, "--to", str(to), "--address", "10.0.0.7", "--days", "30")
    assert "has the credential of node/n0 of cluster lab" in told
    assert Credential.load(to).identity.uri == "spiffe://lab/node/n0"
    (row,) = json.loads(answer(capsys, "-o", "json", "list", *ca))
    assert (row["party"], row["name"], row["state"]) == ("node", "n0", "29 days left")
    assert "copy" in answer(capsys, "revoke", row["serial"], *ca)
    (row,) = json.loads(answer(capsys, "list", "-o", "json", *ca))
    assert row["state"] == "revoked"
    assert "BEGIN PRIVATE KEY" not in told


def test_a_folder_with_another_ones_credential_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--authority", str(tmp_path / "ca"), "--to", str(tmp_path / "n0"))
    answer(capsys, "init", *where[:2], "--cluster", "lab")
    answer(capsys, "issue", "node", "n0", *where)
    assert main(["certs", "issue", "node", "n1", *where]) == 2
    assert (
        "has the credential of node/n0 of cluster lab: give node/n1 of cluster lab a folder" in capsys.readouterr().err
    )
    assert Credential.load(tmp_path / "n0").identity.name == "n0"
    answer(capsys, "issue", "node", "n0", *where)


def test_what_servers_of_ones_own_have_to_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tests/integration/test_server_guard.py` asks servers that were told so."""
    ca = ("--authority", str(tmp_path / "ca"))
    answer(capsys, "init", *ca, "--cluster", "lab")
    for party, name in (("node", "n0"), ("scheduler", "a"), ("job", "math")):
        answer(capsys, "issue", party, name, *ca, "--to", str(tmp_path / party))
    folders = [str(tmp_path / party) for party in ("scheduler", "job")]
    told = json.loads(answer(capsys, "-o", "json", "rights", "--own", str(tmp_path / "node"), *folders))
    assert '"verify_and_map": true' in told["nats"]
    assert '"spiffe://lab/job/math"' in told["nats"]
    default, scheduler, job = told["redis"].splitlines()
    assert (default, scheduler.split()[1], job.split()[1]) == ("user default off", "scheduler/a", "job/math")
    assert Credential.load(tmp_path / "job").store_password not in told["redis"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list --authority {ca}", "make one with tidegate certs init"),
        ("init --authority {ca} --cluster Lab", "cluster 'Lab' of a credential has 1 to 63 lower-case letters"),
        ("issue nod n0 --authority {ca} --to {to}", "the nearest is 'node'"),
        ("issue node n0 --authority {made} --to {to} --days 0", "is not a whole number of at least 1"),
        ("issue node n_0 --authority {made} --to {to}", "name 'n_0' of a credential"),
        ("init --authority {made} --cluster lab", "has an authority already"),
        ("revoke zz --authority {made}", "'zz' is no hexadecimal number"),
        ("revoke 7 --authority {made}", "serial 7 was not issued here"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    answer(capsys, "init", "--authority", str(made), "--cluster", "lab")
    before = sorted(tmp_path.rglob("*"))
    places = {"ca": tmp_path / "ca", "made": made, "to": tmp_path / "to"}
    assert main(["certs", *words.format(**places).split()]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
