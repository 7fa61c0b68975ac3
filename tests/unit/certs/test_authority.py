"""An authority's folder: what it issues, what it revokes, and what it refuses."""

from __future__ import annotations

import resource
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.command import execute
from tidegate.certs.authority import Authority, CertsError, Credential
from tidegate.certs.identity import BadIdentity, Identity, Party

NODE = Identity("lab", Party.NODE, "n0")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "lab")


def test_a_credential_is_read_back_by_whoever_has_its_folder(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(NODE, tmp_path / "n0", addresses=["10.0.0.7", "host.example"])
    found = Credential.load(tmp_path / "n0")
    assert (found.identity, found.revoked) == (NODE, frozenset())
    assert abs((found.ends - issued.ends).total_seconds()) <= 1
    assert Authority.load(tmp_path / "ca").issued() == [issued]


def test_keys_are_readable_by_its_owner_alone(authority: Authority, tmp_path: Path) -> None:
    authority.issue(NODE, tmp_path / "n0")
    for secret in ("ca/ca.key", "n0/credential.pem"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
    for folder in ("ca", "n0"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_a_second_authority_in_the_same_folder_is_refused(authority: Authority, tmp_path: Path) -> None:
    key = (tmp_path / "ca/ca.key").read_bytes()
    with pytest.raises(CertsError, match="has an authority already"):
        Authority.create(tmp_path / "ca", "other")
    assert (tmp_path / "ca/ca.key").read_bytes() == key


def test_a_renewed_credential_takes_the_place_of_the_old_one_and_both_are_known(
    authority: Authority, tmp_path: Path
) -> None:
    first = authority.issue(NODE, tmp_path / "n0")
    password = Credential.load(tmp_path / "n0").store_password
    second = authority.issue(NODE, tmp_path / "n0", days=1)
    assert Credential.load(tmp_path / "n0").store_password == password, "its user in Redis stays"
    assert Credential.load(tmp_path / "n0").ends.date() == second.ends.date() != first.ends.date()
    assert authority.issued() == [first, second]
    files = ["ca.pem", "credential.pem", "revoked.json", "store.password"]
    assert sorted(path.name for path in (tmp_path / "n0").iterdir()) == files


def test_a_credential_for_which_there_was_no_room_is_issued_once_there_is(authority: Authority, tmp_path: Path) -> None:
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    has_line_of_the_list_but_no_certificate = 512
    resource.setrlimit(resource.RLIMIT_FSIZE, (has_line_of_the_list_but_no_certificate, room[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            authority.issue(NODE, tmp_path / "n0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    authority.issue(NODE, tmp_path / "n0")
    assert Credential.load(tmp_path / "n0").identity == NODE


def test_what_is_revoked_is_in_every_later_credential(authority: Authority, tmp_path: Path) -> None:
    first = authority.issue(NODE, tmp_path / "n0")
    authority.revoke(first.serial)
    assert [each.is_revoked for each in authority.issued()] == [True]
    authority.issue(Identity("lab", Party.SCHEDULER, "a"), tmp_path / "a")
    assert Credential.load(tmp_path / "a").revoked == frozenset({first.serial})


def test_the_command_that_renews_a_credential_has_all_that_it_was_issued_with(
    authority: Authority, tmp_path: Path
) -> None:
    folder = tmp_path / "of n0"
    authority.issue(NODE, folder, addresses=["10.0.0.7", "host.example"])
    command = Credential.load(folder).renewal().removeprefix("renew it with tidegate ")
    assert execute(shlex.split(command.replace("AUTHORITY", str(tmp_path / "ca")))) == 0
    renewed = Credential.load(folder)
    assert (renewed.identity, sorted(renewed.addresses)) == (NODE, ["10.0.0.7", "host.example"])
    assert len(authority.issued()) == 2


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda of, to: of.issue(Identity("other", Party.NODE, "n0"), to), "is of cluster lab, not other"),
        (lambda of, to: of.issue(NODE, to, days=0), "lasts 1 to 825 days, not 0"),
        (lambda of, to: of.issue(NODE, to, days=826), "lasts 1 to 825 days, not 826"),
        (lambda of, to: of.issue(NODE, to, addresses=["höst"]), "no IP address and no name of a host"),
        (lambda of, to: of.revoke(7), "serial 7 was not issued here"),
    ],
    ids=["another cluster", "no day", "too many days", "no host", "an unknown serial"],
)
def test_what_is_refused_writes_nothing(
    authority: Authority, tmp_path: Path, refused: Callable[[Authority, Path], object], words: str
) -> None:
    before = {path: path.read_bytes() for path in (tmp_path / "ca").iterdir()}
    with pytest.raises(CertsError, match=words):
        refused(authority, tmp_path / "n0")
    assert {path: path.read_bytes() for path in (tmp_path / "ca").iterdir()} == before
    assert not (tmp_path / "n0").exists()


def test_a_bad_name_of_a_cluster_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadIdentity, match="cluster 'My Lab'"):
        Authority.create(tmp_path / "ca", "My Lab")
    assert not (tmp_path / "ca").exists()


def _of_another_authority(folder: Path) -> None:
    Authority.create(folder.parent / "other", "lab")
    (folder / "ca.pem").write_bytes((folder.parent / "other/ca.pem").read_bytes())


def _with_another_key(folder: Path) -> None:
    own = (folder / "credential.pem").read_bytes()
    Authority.load(folder.parent / "ca").issue(NODE, folder)
    key, begin, _ = (folder / "credential.pem").read_bytes().partition(b"-----BEGIN CERTIFICATE")
    (folder / "credential.pem").write_bytes(key + begin + own.partition(b"-----BEGIN CERTIFICATE")[2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "credential.pem").unlink(), "issue it again"),
        (lambda folder: (folder / "credential.pem").write_bytes(b"nothing"), "issue it again"),
        (lambda folder: (folder / "revoked.json").write_bytes(b'["zz"]'), "copy the authority's there"),
        (lambda folder: (folder / "revoked.json").write_bytes(b"7"), "copy the authority's there"),
        (_of_another_authority, "is of another authority"),
        (_with_another_key, "another key than its certificate's"),
    ],
    ids=["none", "no PEM", "no serial", "no list", "another authority", "another key"],
)
def test_a_damaged_credential_is_refused_with_its_folder(
    authority: Authority, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    authority.issue(NODE, tmp_path / "n0")
    damage(tmp_path / "n0")
    with pytest.raises(CertsError, match=words) as refused:
        Credential.load(tmp_path / "n0")
    assert str(tmp_path / "n0") in str(refused.value)
