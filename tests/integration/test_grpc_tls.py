"""Mutual TLS on real sockets: who is let in, who is not, and what changes while a server runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.expired import issue_expired, read_before_its_end
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import RpcServer, Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.v1 import instance_pb2, instance_pb2_grpc

PATIENCE_S = 10.0
SCHEDULER = Identity("lab", Party.SCHEDULER, "a")
JOB = Identity("lab", Party.JOB, "math")
PINGED = instance_pb2.DescribeWorkersRequest(job="math")


class Instance(instance_pb2_grpc.InstanceServicer):
    """Counts the calls that reach it."""

    num_calls = 0

    async def DescribeWorkers(self, request: Any, context: Any) -> instance_pb2.DescribeWorkersResponse:
        self.num_calls += 1
        return instance_pb2.DescribeWorkersResponse()

    async def GateReport(self, request: Any, context: Any) -> instance_pb2.GateReportResponse:
        self.num_calls += 1
        return instance_pb2.GateReportResponse(node="n0")


class Lab:
    """A cluster's authority, the folder of everybody's credential, and one instance of job `math`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "ca", "lab")
        self.instance = Instance()  # type: ignore[abstract]  # the other calls stay the generated ones
        self.service = Service(
            instance_pb2.DESCRIPTOR.services_by_name["Instance"],
            partial(instance_pb2_grpc.add_InstanceServicer_to_server, self.instance),
        )
        self.server: RpcServer

    def credential(self, identity: Identity, *, by: Authority | None = None) -> Path:
        folder = self.folder / f"{identity.party}-{identity.name}"
        (by or self.authority).issue(identity, folder)
        return folder

    @asynccontextmanager
    async def calling(self, folder: Path, peer: Identity = JOB) -> AsyncIterator[instance_pb2_grpc.InstanceAsyncStub]:
        channels = Channels(default_timeout_s=PATIENCE_S, tls=Credentials(folder))
        try:
            yield instance_pb2_grpc.InstanceStub(channels.connect(self.server.endpoint, peer))
        finally:
            await channels.close()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    found = Lab(tmp_path)
    # Beyond loopback: with TLS that is allowed.
    found.server = await serve([found.service], "0.0.0.0:0", tls=Credentials(found.credential(JOB)))
    found.server.endpoint = f"127.0.0.1:{found.server.port}"
    try:
        yield found
    finally:
        await found.server.stop(grace_s=0.0)


async def test_a_jobs_own_process_and_the_scheduler_may_call_what_the_schema_says(lab: Lab) -> None:
    async with lab.calling(lab.credential(JOB)) as stub:
        await stub.DescribeWorkers(PINGED)
    async with lab.calling(lab.credential(SCHEDULER)) as stub:
        assert (await stub.GateReport(instance_pb2.GateReportRequest())).node == "n0"
    assert lab.instance.num_calls == 2


@pytest.mark.parametrize(
    ("caller", "words"),
    [
        (SCHEDULER, "scheduler/a of cluster lab may not call .*DescribeWorkers: job may"),
        (Identity("lab", Party.OPERATOR, "anna"), "operator/anna of cluster lab may not call"),
        (Identity("lab", Party.NODE, "n0"), "node/n0 of cluster lab may not call"),
        (Identity("lab", Party.JOB, "other"), "job/other .* a job reaches its own processes alone"),
    ],
    ids=["the scheduler", "an operator", "a node", "another job"],
)
async def test_a_call_that_the_schema_does_not_allow_does_not_reach_its_handler(
    lab: Lab, caller: Identity, words: str
) -> None:
    async with lab.calling(lab.credential(caller)) as stub:
        with pytest.raises(PeerRefused, match=words) as refused:
            await stub.DescribeWorkers(PINGED)
    assert (refused.value.status, refused.value.error) == ("PERMISSION_DENIED", "NotAllowed")
    assert lab.instance.num_calls == 0


async def test_a_call_with_a_credential_of_another_authority_does_not_reach_its_handler(lab: Lab) -> None:
    other = Authority.create(lab.folder / "other", "lab")
    folder = lab.credential(Identity("lab", Party.JOB, "stranger"), by=other)
    # It believes the server, and the server does not believe it.
    (folder / "ca.pem").write_bytes((lab.folder / "ca/ca.pem").read_bytes())
    assert await _status_with_files_of(lab, folder) is grpc.StatusCode.UNAVAILABLE
    assert lab.instance.num_calls == 0


async def test_a_call_with_an_expired_credential_does_not_reach_its_handler(lab: Lab) -> None:
    folder = issue_expired(lab.authority, JOB, lab.folder / "old")
    assert await _status_with_files_of(lab, folder) is grpc.StatusCode.UNAVAILABLE
    assert lab.instance.num_calls == 0


async def test_a_call_without_a_credential_does_not_reach_its_handler(lab: Lab) -> None:
    for channel in (
        grpc.aio.insecure_channel(lab.server.endpoint),
        grpc.aio.secure_channel(
            lab.server.endpoint,
            grpc.ssl_channel_credentials((lab.folder / "ca/ca.pem").read_bytes()),
            options=[("grpc.ssl_target_name_override", JOB.server_name)],
        ),
    ):
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await instance_pb2_grpc.InstanceStub(channel).DescribeWorkers(PINGED, timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert lab.instance.num_calls == 0


async def test_a_caller_does_not_talk_to_a_server_that_is_not_who_it_wants(lab: Lab) -> None:
    async with lab.calling(lab.credential(SCHEDULER), peer=Identity("lab", Party.JOB, "other")) as stub:
        with pytest.raises(PeerUnavailable) as refused:
            await stub.GateReport(instance_pb2.GateReportRequest())
    assert "has another one's certificate" in refused.value.reason
    channels = Channels(default_timeout_s=PATIENCE_S, tls=Credentials(lab.credential(SCHEDULER)))
    with pytest.raises(ValueError, match=r"say who has to answer at 127\.0\.0\.1"):
        channels.connect(lab.server.endpoint)


async def test_a_caller_that_is_revoked_while_it_is_connected_is_refused_at_its_next_call(lab: Lab) -> None:
    async with lab.calling(lab.credential(JOB)) as stub:
        await stub.DescribeWorkers(PINGED)
        lab.authority.revoke(lab.authority.issued()[-1].serial)
        (lab.folder / "job-math/revoked.json").write_bytes((lab.folder / "ca/revoked.json").read_bytes())
        with pytest.raises(PeerRefused, match="is revoked: issue the credential again") as refused:
            await stub.DescribeWorkers(PINGED)
    assert refused.value.status == "UNAUTHENTICATED"
    assert lab.instance.num_calls == 1


async def test_a_revoked_caller_stays_refused_where_the_list_of_them_is_gone(lab: Lab) -> None:
    folder, caller = lab.folder / "job-math", lab.credential(SCHEDULER)
    lab.authority.revoke(lab.authority.issued()[-1].serial)
    shutil.copy(lab.folder / "ca/revoked.json", folder)
    for is_gone in (False, True):
        if is_gone:
            (folder / "revoked.json").unlink()
        with pytest.raises(PeerRefused, match="is revoked"):
            await _call(lab, Credentials(caller))


def test_the_last_good_list_of_revoked_ones_stays_until_there_is_one_again(lab: Lab) -> None:
    folder = lab.credential(JOB)
    credentials = Credentials(folder)
    before = credentials.now()
    with capture_logs() as lines:
        (folder / "revoked.json").unlink()
        assert credentials.now() == before
        lab.authority.issue(JOB, lab.folder / "next")
        shutil.copy(lab.folder / "next/credential.pem", folder)
        renewed = credentials.now()
        assert (renewed.cert != before.cert, renewed.revoked) == (True, before.revoked)
    want = f"{folder / 'revoked.json'} is gone: copy the authority's there"
    assert [(line["event"], line["error"]) for line in lines] == [("revoked ones not read again", want)] * 2
    lab.authority.revoke(lab.authority.issued()[-1].serial)
    shutil.copy(lab.folder / "ca/revoked.json", folder)
    assert credentials.now().revoked != before.revoked


def test_a_renewed_credential_counts_in_a_folder_that_never_had_a_list_of_revoked_ones(lab: Lab) -> None:
    folder, renewed = lab.credential(JOB), lab.folder / "renewed"
    (folder / "revoked.json").unlink()
    credentials = Credentials(folder)
    before = credentials.now()
    lab.authority.issue(JOB, renewed)
    shutil.copy(renewed / "credential.pem", folder)
    assert before.cert != credentials.now().cert == Credentials(renewed).now().cert
    lab.authority.revoke(lab.authority.issued()[0].serial)
    shutil.copy(lab.folder / "ca/revoked.json", folder)
    assert credentials.now().revoked, "one that comes later counts too"


async def test_a_caller_whose_own_credential_ended_while_it_ran_is_told_so(lab: Lab) -> None:
    folder = issue_expired(lab.authority, SCHEDULER, lab.folder / "old")
    with pytest.raises(PeerUnavailable) as refused:
        await _call(lab, read_before_its_end(folder))
    ended = datetime.now(UTC) - timedelta(days=1)
    assert refused.value.reason.startswith(f"the credential of {SCHEDULER} in {folder} ended on {ended:%Y-%m-%d} ")
    remedy = f"renew it with tidegate certs issue scheduler a --authority AUTHORITY --to {folder}"
    assert f" UTC: {remedy} ({lab.server.endpoint} " in refused.value.reason
    assert str(refused.value).startswith(f"the credential of {SCHEDULER} in {folder} ended on ")


async def test_a_caller_is_told_that_the_servers_certificate_has_ended(lab: Lab) -> None:
    folder = issue_expired(lab.authority, JOB, lab.folder / "old")
    await lab.server.stop(grace_s=0.0)
    lab.server = await serve([lab.service], "127.0.0.1:0", tls=read_before_its_end(folder))
    with pytest.raises(PeerUnavailable) as refused:
        await _call(lab, Credentials(lab.credential(SCHEDULER)))
    assert refused.value.reason == (
        f"the certificate of {JOB} at {lab.server.endpoint} has ended: renew it there with tidegate certs issue"
    )


async def test_a_caller_is_told_that_the_server_has_a_foreign_certificate(lab: Lab) -> None:
    other = Authority.create(lab.folder / "other", "lab")
    with pytest.raises(PeerUnavailable) as refused:
        await _call(lab, Credentials(lab.credential(SCHEDULER, by=other)))
    assert "has a certificate of another authority than ours" in refused.value.reason


@pytest.mark.parametrize(("days", "num_warnings"), [(14, 1), (15, 0)])
async def test_a_server_warns_once_at_its_start_of_a_credential_that_ends_soon(
    lab: Lab, days: int, num_warnings: int
) -> None:
    folder = lab.folder / "soon"
    ends = lab.authority.issue(JOB, folder, days=days).ends
    with capture_logs() as lines:
        server = await serve([lab.service], "127.0.0.1:0", tls=Credentials(folder))
        await server.stop(grace_s=0.0)
    found = [line for line in lines if line["event"] == "credential ends soon"]
    assert [line["log_level"] for line in found] == ["warning"] * num_warnings
    for line in found:
        assert line["message"] == (
            f"the credential of {JOB} in {folder} ends on {ends:%Y-%m-%d %H:%M} UTC: "
            f"renew it with tidegate certs issue job math --authority AUTHORITY --to {folder}"
        )


async def test_a_server_takes_up_a_renewed_credential_and_keeps_the_last_good_one(lab: Lab) -> None:
    folder, caller = lab.folder / "job-math", lab.credential(SCHEDULER)
    report = instance_pb2.GateReportRequest()
    before = await _certificate_of(lab)
    lab.authority.issue(JOB, folder)
    assert await _certificate_of(lab) != before
    after = await _certificate_of(lab)
    (folder / "credential.pem").write_bytes(b"half of")
    assert await _certificate_of(lab) == after
    folder.rename(lab.folder / "away")
    assert await _certificate_of(lab) == after
    async with lab.calling(caller) as stub:
        await stub.GateReport(report)


def test_a_process_without_tls_does_not_load_its_library() -> None:
    code = (
        "import sys, tidegate.adapters.grpc_client, tidegate.adapters.grpc_server; print('cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


async def _call(lab: Lab, tls: Credentials) -> None:
    channels = Channels(default_timeout_s=PATIENCE_S, tls=tls)
    try:
        stub: Any = instance_pb2_grpc.InstanceStub(channels.connect(lab.server.endpoint, JOB))
        await stub.GateReport(instance_pb2.GateReportRequest())
    finally:
        await channels.close()


async def _status_with_files_of(lab: Lab, folder: Path) -> grpc.StatusCode:
    """Of a call with a credential that `Credentials` itself would refuse."""
    key, begin, cert = (folder / "credential.pem").read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
    own = grpc.ssl_channel_credentials((lab.folder / "ca/ca.pem").read_bytes(), key, begin + cert)
    options = [("grpc.ssl_target_name_override", JOB.server_name)]
    async with grpc.aio.secure_channel(lab.server.endpoint, own, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await instance_pb2_grpc.InstanceStub(channel).DescribeWorkers(PINGED, timeout=PATIENCE_S)
    return refused.value.code()


async def _certificate_of(lab: Lab) -> bytes:
    """The certificate that the server shows to a new connection."""
    context = ssl.create_default_context(cafile=str(lab.folder / "ca/ca.pem"))
    context.load_cert_chain(lab.credential(Identity("lab", Party.VIEWER, "looks")) / "credential.pem")
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", lab.server.port, ssl=context, server_hostname=JOB.server_name
    )
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    del reader
    return shown
