"""The authority of a cluster: it certifies who somebody is, for a while, and says whom not to believe any more.

Its folder, of mode 0700, each private key of mode 0600:

    ca.pem, ca.key      the authority's certificate, of 10 years, and its key. Whoever has the key is everybody.
    revoked.json        serial numbers (hexadecimal) that are not believed any more, until they expire
    issued.jsonl        one line for each certificate: serial, identity, end

A credential's folder, which is copied to where it is used:

    ca.pem              the authority's certificate
    credential.pem      key and certificate. One file, so that no reader ever has the one without the other
    revoked.json
    store.password      the password of its user in Redis, the same as long as the folder lasts

Keys are of the curve P-256. A certificate serves for both ends of a connection. Its beginning is an hour ago, since
clocks differ. To renew is to issue again under the same identity: a server reads its files at each connection, so that
nothing is stopped.

Invariants:
- A key is never readable by others, not for a moment. [test_authority: readable_by_its_owner_alone]
- Nothing that is there is overwritten by a new authority. [test_authority: a_second_authority]
- A reader has the old credential or the new one, whole. [test_authority: a_renewed_credential]
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import IO, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidegate.certs.identity import Identity, Party
from tidegate.json_text import parse_json

CA_CERT, CA_KEY, CREDENTIAL, REVOKED, ISSUED = "ca.pem", "ca.key", "credential.pem", "revoked.json", "issued.jsonl"
STORE_PASSWORD = "store.password"
MOST_DAYS = 825
"""No certificate but the authority's lasts longer. Browsers and many libraries take none that does."""
SOON_DAYS = 14
"""People are warned so long before a credential's end. `make deploy` renews its own earlier."""
_AUTHORITY_DAYS = 3650
_CLOCKS_DIFFER = timedelta(hours=1)
_BEGIN = b"-----BEGIN CERTIFICATE-----"


class CertsError(RuntimeError):
    """A credential or an authority cannot be made, read or used. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was issued."""

    serial: int
    identity: Identity
    ends: datetime
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class Credential:
    """The PEM texts of who somebody is.

    `addresses`: names and IP addresses at which its server is also known. `revoked`: serial numbers. None: the folder
    has no list of them."""

    folder: Path
    identity: Identity
    addresses: tuple[str, ...]
    ca: bytes
    cert: bytes
    key: bytes
    ends: datetime
    store_password: str
    revoked: frozenset[int] | None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """CertsError where files are missing, damaged, do not fit each other, or are expired."""
        try:
            ca, (key, begin, cert) = (
                (folder / CA_CERT).read_bytes(),
                (folder / CREDENTIAL).read_bytes().partition(_BEGIN),
            )
            found = x509.load_pem_x509_certificate(begin + cert)
            identity = identity_of(found)
            found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
            store_password = (folder / STORE_PASSWORD).read_text()
            fits = load_pem_private_key(key, None).public_key() == found.public_key()
        except (OSError, ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise CertsError(f"the credential in {folder} cannot be read ({error}): issue it again") from error
        except InvalidSignature as error:
            raise CertsError(
                f"the credential in {folder} is of another authority than its {CA_CERT}: issue it again"
            ) from error
        if not fits:
            raise CertsError(f"{folder / CREDENTIAL} has another key than its certificate's: issue it again")
        own = cls(
            folder=folder,
            identity=identity,
            addresses=_addresses_of(found, identity),
            ca=ca,
            cert=begin + cert,
            key=key,
            ends=found.not_valid_after_utc,
            store_password=store_password,
            revoked=_read_revoked(folder),
        )
        if own.days_left() < 0:
            raise CertsError(f"{own.until()}: {own.renewal()}")
        return own

    def days_left(self) -> int:
        """Whole days. Below 0: it has ended."""
        return (self.ends - datetime.now(UTC)).days

    def until(self) -> str:
        """Whose it is, where it is and when it ends, for people."""
        verb = "ended" if self.days_left() < 0 else "ends"
        return f"the credential of {self.identity} in {self.folder} {verb} on {self.ends:%Y-%m-%d %H:%M} UTC"

    def renewal(self) -> str:
        """What to do before or after its end, for people."""
        words = ["tidegate certs issue", self.identity.party, self.identity.name, "--authority AUTHORITY"]
        words += ["--to", shlex.quote(str(self.folder)), *(f"--address {each}" for each in self.addresses)]
        return f"renew it with {' '.join(words)}"


class Authority:
    """`create` or `load` makes it."""

    def __init__(self, folder: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._folder = folder
        self._cert = cert
        self._key = key
        (name,) = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        self.cluster = str(name.value)

    @classmethod
    def create(cls, folder: Path, cluster: str) -> Self:
        """CertsError where the folder has an authority. BadIdentity for a bad name of the cluster."""
        Identity(cluster, Party.SCHEDULER, "any")  # a bad name is refused before anything is written
        if (folder / CA_KEY).exists() or (folder / CA_CERT).exists():
            raise CertsError(f"{folder} has an authority already: choose another folder, or issue with this one")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cluster)])
        cert = (
            _certificate(name, name, key, now + timedelta(days=_AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, SHA256())
        )
        _write(folder / CA_KEY, _pem(key))
        _write(folder / CA_CERT, cert.public_bytes(Encoding.PEM), mode=0o644)
        return cls(folder, cert, key)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """CertsError."""
        try:
            cert = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
            key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise CertsError(
                f"{folder} has no authority that can be read ({error}): make one with tidegate certs init"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise CertsError(f"{folder / CA_KEY} is not the key of {folder / CA_CERT}")
        return cls(folder, cert, key)

    def issue(self, identity: Identity, folder: Path, *, addresses: Sequence[str] = (), days: int = 90) -> Issued:
        """Writes a credential into a folder, in the place of one that is there. `addresses`: names and IP addresses at
        which a server of this identity is also known. CertsError."""
        if identity.cluster != self.cluster:
            raise CertsError(f"the authority in {self._folder} is of cluster {self.cluster}, not {identity.cluster}")
        if not 1 <= days <= MOST_DAYS:
            raise CertsError(f"a credential lasts 1 to {MOST_DAYS} days, not {days}")
        key, ends = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) + timedelta(days=days)
        names = [
            x509.UniformResourceIdentifier(identity.uri),
            x509.DNSName(identity.server_name),
            *map(_alternative_name, addresses),
        ]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
        cert = (
            _certificate(subject, self._cert.subject, key, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, SHA256())
        )
        line = {"serial": f"{cert.serial_number:x}", "identity": identity.uri, "ends": ends.isoformat()}
        with _open(self._folder / ISSUED, os.O_APPEND) as stream:
            stream.write(json.dumps(line).encode() + b"\n")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / CA_CERT, self._cert.public_bytes(Encoding.PEM), mode=0o644)
        _write(folder / REVOKED, _revoked_text(self._revoked()), mode=0o644)
        if not (folder / STORE_PASSWORD).exists():
            _write(folder / STORE_PASSWORD, secrets.token_urlsafe(32).encode())
        _write(folder / CREDENTIAL, _pem(key) + cert.public_bytes(Encoding.PEM))
        return Issued(cert.serial_number, identity, ends)

    def issued(self) -> list[Issued]:
        """Those that have not expired, in order. CertsError."""
        revoked, now, found = self._revoked(), datetime.now(UTC), []
        try:
            for line in (self._folder / ISSUED).read_text().splitlines():
                fields = parse_json(line)
                ends, serial = datetime.fromisoformat(fields["ends"]), int(fields["serial"], 16)
                if ends > now:
                    found.append(Issued(serial, Identity.parse(fields["identity"]), ends, serial in revoked))
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise CertsError(f"{self._folder / ISSUED} is damaged ({error})") from error
        return found

    def revoke(self, *serials: int) -> None:
        """Believes these no more. Each server learns it from its `revoked.json`: copy the authority's there. CertsError
        for a number that was not issued here, or has expired."""
        known = {each.serial for each in self.issued()}
        if unknown := sorted(set(serials) - known):
            raise CertsError(f"serial {unknown[0]:x} was not issued here, or has expired: see tidegate certs list")
        _write(self._folder / REVOKED, _revoked_text((self._revoked() & known) | set(serials)), mode=0o644)

    def _revoked(self) -> frozenset[int]:
        return _read_revoked(self._folder) or frozenset()


def identity_of(cert: x509.Certificate) -> Identity:
    """ValueError, ExtensionNotFound where it has none or several."""
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    return Identity.parse(uri)


def _addresses_of(cert: x509.Certificate, identity: Identity) -> tuple[str, ...]:
    """Those that it was issued with."""
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return tuple(each for each in found if each != identity.server_name)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCKS_DIFFER)
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(address: str) -> x509.GeneralName:
    try:
        found: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        try:
            return x509.DNSName(address)
        except ValueError as error:
            raise CertsError(f"{address!r} is no IP address and no name of a host") from error
    return x509.IPAddress(found)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _revoked_text(serials: Iterable[int]) -> bytes:
    return json.dumps([f"{serial:x}" for serial in sorted(serials)]).encode()


def _read_revoked(folder: Path) -> frozenset[int] | None:
    """None: there is no list. CertsError where it is damaged: who is revoked must not be believed because of that."""
    try:
        return frozenset(int(serial, 16) for serial in parse_json((folder / REVOKED).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CertsError(f"{folder / REVOKED} cannot be read ({error}): copy the authority's there") from error


def _open(path: Path, flags: int = 0, *, mode: int = 0o600) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode), "ab")


def _write(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replaces the file at once, so that a reader has the old one or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of an earlier call that found no room
    with _open(partial, os.O_EXCL, mode=mode) as stream:
        stream.write(content)
    partial.rename(path)
