"""gRPC with mutual TLS: who calls proves who he is, and may call what the schema says.

The schema names the callers of each method (`access.proto`). A server asks, in this order:
1. TLS: the certificate is of the cluster's authority, and has not expired.
2. Its serial number is not revoked.
3. It names an identity of this cluster, whose party the method names.
4. A job's credential reaches only servers of that job, and schedulers.

A client connects to an identity, not to an address: TLS compares the server's certificate with the name that is wanted.

The files are read again for each connection that a server takes, and for each channel that a client opens. So a renewed
credential, and a longer list of revoked ones, count without a restart. Where they cannot be read, the last good ones
stay in force, with a warning. Where the list of revoked ones was there and is gone, the last one stays in force. A
folder that never had one is fine.

A server gives gRPC a credential for a new connection only where it is another one than before. gRPC frees what it had
then, and a connection that is taken in the same moment may still use it, which ends the process (grpc/grpc#36693).

Invariants:
- A call without a credential, or with a foreign or an expired one, does not reach its handler.
  [test_grpc_tls: without_a_credential] [test_grpc_tls: of_another_authority] [test_grpc_tls: an_expired_credential]
- A method is reached by the callers that it names alone. [test_grpc_callers: reached_by_its_callers_alone]
- A method that names no callers may be called by nobody. [test_grpc_callers: each_method_names_its_callers]
- A revoked credential is refused on a connection that is open already. [test_grpc_tls: revoked_while_it_is_connected]
- Nobody is believed again because the list of revoked ones is gone. [test_grpc_tls: the_list_of_them_is_gone]
- Connections that come at once do not end a server. [test_tls_connections: survives_many_connections]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path

import grpc
import structlog
from cryptography import x509
from google.protobuf.descriptor import ServiceDescriptor

from tidegate.certs.authority import CA_CERT, CREDENTIAL, REVOKED, SOON_DAYS, CertsError, Credential
from tidegate.certs.identity import Identity, NotAllowed, NotAuthenticated, Party
from tidegate.v1 import access_pb2

AuthContext = Mapping[str, Iterable[bytes]]

_SETTLE_S = 0.05
"""How long a renewal waits, so that connections before it have what they need. gRPC does not say when they have. No
other connection begins meanwhile."""


class Credentials:
    """The credential in a folder, as its files are now. CertsError where they are bad from the beginning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._stamps()
        self._current = Credential.load(folder)
        self._warned: date | None = None
        self._log = structlog.get_logger("tidegate.tls")

    @property
    def identity(self) -> Identity:
        return self._current.identity

    def now(self) -> Credential:
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._current = self._read_again()
            except CertsError as error:
                self._log.warning("credential not read again", error=str(error))
        return self._current

    def warn_of_its_end(self) -> None:
        """Logs it once a day where the end is near."""
        own, today = self.now(), datetime.now(UTC).date()
        if own.days_left() < SOON_DAYS and self._warned != today:
            self._warned = today
            self._log.warning("credential ends soon", message=f"{own.until()}: {own.renewal()}")

    def for_server(self) -> grpc.ServerCredentials:
        """For one port of one server."""
        return _Shown(self).credentials()

    def access(self, services: Sequence[ServiceDescriptor], *, for_all: Sequence[ServiceDescriptor] = ()) -> Access:
        """Who may call a server of this credential. `for_all`: services that each party may call."""
        return Access(self, services, for_all=for_all)

    def _read_again(self) -> Credential:
        """CertsError."""
        found = Credential.load(self._folder)
        if found.revoked is None and self._current.revoked is not None:
            gone = self._folder / REVOKED
            self._log.warning("revoked ones not read again", error=f"{gone} is gone: copy the authority's there")
            return replace(found, revoked=self._current.revoked)
        return found

    def _stamps(self) -> tuple[tuple[int, int] | None, ...]:
        """They differ once a file is another one, comes or goes."""
        return tuple(_stamp(self._folder / name) for name in (CA_CERT, CREDENTIAL, REVOKED))


class _Shown:
    """What one port shows to its callers."""

    def __init__(self, source: Credentials) -> None:
        self._source = source
        self._shown = source.now()

    def credentials(self) -> grpc.ServerCredentials:
        self._source.warn_of_its_end()
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown),
            self._renewed,  # type: ignore[arg-type]  # the stubs know no None
            True,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks for each connection, for one at a time. None: what it has still counts."""
        own = self._source.now()
        self._source.warn_of_its_end()
        if (own.key, own.cert, own.ca) == (self._shown.key, self._shown.cert, self._shown.ca):
            return None
        self._shown = own
        time.sleep(_SETTLE_S)
        return _configuration(own)


def _configuration(own: Credential) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.cert)], root_certificates=own.ca)


class Access:
    """Who may call the methods of one server."""

    def __init__(
        self,
        credentials: Credentials,
        services: Sequence[ServiceDescriptor],
        *,
        for_all: Sequence[ServiceDescriptor] = (),
    ) -> None:
        self._credentials = credentials
        self._callers = {
            f"/{service.full_name}/{method.name}": callers_of(service, method.name)
            for service in services
            for method in service.methods
        } | {
            f"/{service.full_name}/{method.name}": frozenset(Party) for service in for_all for method in service.methods
        }
        self.num_refused: Counter[str] = Counter()
        """By method. Calls that no method of a known service answers are counted under ""."""
        self._log = structlog.get_logger("tidegate.tls")

    def check(self, method: str, context: AuthContext, *, has_begun_earlier: bool = False) -> Identity:
        """Who calls. NotAuthenticated or NotAllowed; both are logged and counted. `has_begun_earlier`: the call has, so
        that its certificate may have ended since TLS looked at it."""
        try:
            caller = self._caller(context, has_begun_earlier=has_begun_earlier)
            self._check_party(method, caller)
        except (NotAuthenticated, NotAllowed) as refused:
            counted = method if method in self._callers else ""
            self.num_refused[counted] += 1
            num_refused = self.num_refused[counted]
            self._log.warning("call refused", method=method, reason=str(refused), num_refused=num_refused)
            raise
        return caller

    def _caller(self, context: AuthContext, *, has_begun_earlier: bool) -> Identity:
        (pem,) = context.get("x509_pem_cert", ()) or (b"",)
        if not pem:
            raise NotAuthenticated("the call has no certificate: give a credential of tidegate certs issue")
        serial, uris, ends = _read(pem)
        own = self._credentials.now()
        if serial in (own.revoked or ()):
            raise NotAuthenticated(f"the certificate {serial:x} is revoked: issue the credential again")
        if has_begun_earlier and ends < datetime.now(UTC):
            raise NotAuthenticated(f"the certificate {serial:x} has ended: issue the credential again")
        try:
            (uri,) = uris
            caller = Identity.parse(uri)
        except ValueError as error:
            raise NotAuthenticated(f"the certificate names no identity ({error})") from error
        if caller.cluster != own.identity.cluster:
            raise NotAuthenticated(f"the credential of {caller} is none of cluster {own.identity.cluster}")
        return caller

    def _check_party(self, method: str, caller: Identity) -> None:
        own, callers = self._credentials.identity, self._callers.get(method, frozenset())
        if caller.party not in callers:
            may = ", ".join(sorted(callers)) or "nobody"
            raise NotAllowed(f"{caller} may not call {method}: {may} may")
        if caller.party is Party.JOB and own.party is not Party.SCHEDULER and caller != own:
            raise NotAllowed(f"{caller} may not call {method} of {own}: a job reaches its own processes alone")


def _stamp(path: Path) -> tuple[int, int] | None:
    """None: the file cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def callers_of(service: ServiceDescriptor, method: str) -> frozenset[Party]:
    """The parties that the schema names."""
    options = service.methods_by_name[method].GetOptions()
    names = (access_pb2.Party.Name(number) for number in options.Extensions[access_pb2.callers])
    return frozenset(Party(name.removeprefix("PARTY_").lower()) for name in names)


@lru_cache(maxsize=1024)
def _read(pem: bytes) -> tuple[int, tuple[str, ...], datetime]:
    """The serial number, the URIs and the end of a certificate that TLS has checked."""
    cert = x509.load_pem_x509_certificate(pem)
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return cert.serial_number, (), cert.not_valid_after_utc
    uris = tuple(names.get_values_for_type(x509.UniformResourceIdentifier))
    return cert.serial_number, uris, cert.not_valid_after_utc
