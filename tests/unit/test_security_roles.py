"""The table of methods and roles covers exactly the services that exist, and both interceptors hold it."""

from __future__ import annotations

import dataclasses
from concurrent import futures

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from fusion.base.clock import ManualClock, SystemClock
from fusion.base.ids import ClusterId
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role
from fusion.security.roles import METHOD_ROLES, Access, Authorizer
from fusion.security.tls import channel_credentials, node_server_name, server_credentials
from fusion.wire.v1 import (
    coordinator_pb2,
    enrolment_pb2,
    graph_pb2,
    job_pb2,
    node_pb2,
    peer_pb2,
    plan_pb2,
    probe_pb2,
    relay_pb2,
    tensor_pb2,
)

CLUSTER = ClusterId("abcdefghij")
FILES = (
    coordinator_pb2,
    enrolment_pb2,
    graph_pb2,
    job_pb2,
    node_pb2,
    peer_pb2,
    plan_pb2,
    probe_pb2,
    relay_pb2,
    tensor_pb2,
)


def all_methods():
    methods = {}
    for module in FILES:
        proto = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        for service in proto.service:
            descriptor = descriptor_pool.Default().FindServiceByName(f"{proto.package}.{service.name}")
            for method in descriptor.methods:
                methods[f"/{descriptor.full_name}/{method.name}"] = method
    return methods


def test_every_wire_file_is_looked_at():
    from pathlib import Path

    import fusion.wire.v1

    present = {path.stem for path in Path(fusion.wire.v1.__file__).parent.glob("*_pb2.py")}
    assert present == {module.__name__.rsplit(".", 1)[-1] for module in FILES}


def test_the_table_holds_every_method_and_nothing_else():
    assert set(METHOD_ROLES) == set(all_methods())


def test_only_the_roles_that_the_contract_names_may_call():
    assert METHOD_ROLES["/fusion.wire.v1.Peer/Exchange"] == {Role.NODE}
    assert METHOD_ROLES["/fusion.wire.v1.Enrolment/Enrol"] == set()
    assert METHOD_ROLES["/fusion.wire.v1.Enrolment/RenewExpired"] == set()
    assert METHOD_ROLES["/fusion.wire.v1.Admin/CreateToken"] == {Role.ADMIN}
    for method, roles in METHOD_ROLES.items():
        assert Role.COORDINATOR not in roles
        if "/fusion.wire.v1.NodeControl/" in method:
            assert roles == {Role.NODE}
        if "/fusion.wire.v1.Jobs/" in method:
            assert roles == {Role.OWNER, Role.ADMIN}


class EveryMethod(grpc.GenericRpcHandler):
    """Answers any method of any kind, so that only the interceptor decides."""

    def __init__(self):
        self.served = []

    def service(self, details):
        method = all_methods()[details.method]
        kind = "_".join("stream" if flag else "unary" for flag in (method.client_streaming, method.server_streaming))

        def answer(_request, _context):
            self.served.append(details.method)
            return iter([b""]) if method.server_streaming else b""

        return getattr(grpc, f"{kind}_rpc_method_handler")(answer)


@pytest.fixture(scope="module")
def ca():
    return CertificateAuthority.create(CLUSTER, SystemClock().wall_s())


@pytest.fixture(scope="module")
def served(ca):
    """A threaded server, as workers run one, with a clock that the test turns."""
    clock = ManualClock(wall_s=SystemClock().wall_s())
    revoked = set()
    server_identity = ca.new_credentials(Role.NODE, "server", "", clock.wall_s())
    handlers = EveryMethod()
    server = grpc.server(
        futures.ThreadPoolExecutor(4),
        interceptors=[Authorizer(Access(CLUSTER, revoked=lambda: revoked, clock=clock))],
        options=[("grpc.so_reuseport", 0)],
    )
    server.add_generic_rpc_handlers([handlers])
    port = server.add_secure_port("127.0.0.1:0", server_credentials(server_identity))
    server.start()
    yield f"127.0.0.1:{port}", server_identity, handlers, clock, revoked
    server.stop(None).wait()


def call(channel, method):
    descriptor = all_methods()[method]
    kind = "_".join(
        "stream" if flag else "unary" for flag in (descriptor.client_streaming, descriptor.server_streaming)
    )
    stub = getattr(channel, kind)(method)
    request = iter([b""]) if descriptor.client_streaming else b""
    answer = stub(request, timeout=10)
    return list(answer) if descriptor.server_streaming else answer


def open_channel(address, server, credentials):
    name = node_server_name(CLUSTER, server.identity)
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(address, channel_credentials(credentials), options=options)


@pytest.mark.parametrize("role", list(Role))
def test_t8_each_role_reaches_exactly_its_methods(served, ca, role):
    address, server, handlers, clock, _ = served
    caller = ca.new_credentials(role, "caller", "", clock.wall_s())
    with open_channel(address, server, caller) as channel:
        for method, roles in METHOD_ROLES.items():
            handlers.served.clear()
            if role in roles:
                call(channel, method)
                assert handlers.served == [method]
                continue
            with pytest.raises(grpc.RpcError) as caught:
                call(channel, method)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
            assert ("fusion-error", "AuthError") in caught.value.trailing_metadata()
            assert handlers.served == []


def test_a_method_that_the_table_forgot_is_refused(served, ca):
    from fusion.security.roles import _Refused

    _, _, _, clock, _ = served
    admin = ca.new_credentials(Role.ADMIN, "a", "", clock.wall_s())

    class Context:
        def auth_context(self):
            return {"x509_pem_cert": [admin.certificate_pem]}

    access = Access(CLUSTER, clock=clock, roles={})
    with pytest.raises(_Refused, match="may not call"):
        access.check("/fusion.wire.v1.Admin/Info", Context())


def test_f24_a_clock_that_is_put_back_throws_nobody_out(served, ca):
    address, server, _, clock, _ = served
    caller = ca.new_credentials(Role.NODE, "caller", "", clock.wall_s())
    with open_channel(address, server, caller) as channel:
        clock.jump_wall(-3600)
        call(channel, "/fusion.wire.v1.Peer/Exchange")
        clock.jump_wall(3600)


def test_t20_an_open_connection_ends_with_its_certificate_and_with_revocation(served, ca):
    address, server, _, clock, revoked = served
    method = "/fusion.wire.v1.Peer/Exchange"
    caller = ca.new_credentials(Role.NODE, "caller", "", clock.wall_s())
    with open_channel(address, server, caller) as channel:
        call(channel, method)
        revoked.add(caller.identity)
        with pytest.raises(grpc.RpcError, match="was revoked") as caught:
            call(channel, method)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        revoked.clear()
        clock.jump_wall(7 * 86400 + 5)
        try:
            with pytest.raises(grpc.RpcError, match="certificate expired") as caught:
                call(channel, method)
        finally:
            clock.jump_wall(-7 * 86400 - 5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call(channel, method)


def test_b33_foreign_and_missing_certificates_do_not_get_through_tls(served, ca):
    address, server, handlers, clock, _ = served
    handlers.served.clear()
    foreign = CertificateAuthority.create(CLUSTER, clock.wall_s()).new_credentials(Role.NODE, "f", "", clock.wall_s())
    long_ago = clock.wall_s() - 8 * 86400
    expired = ca.new_credentials(Role.NODE, "e", "", long_ago)
    for credentials in (dataclasses.replace(foreign, ca_pem=ca.pem), expired):
        with open_channel(address, server, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
            call(channel, "/fusion.wire.v1.Peer/Exchange")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    options = [("grpc.ssl_target_name_override", node_server_name(CLUSTER, server.identity))]
    nobody = grpc.ssl_channel_credentials(ca.pem)
    with grpc.secure_channel(address, nobody, options=options) as channel, pytest.raises(grpc.RpcError) as caught:
        call(channel, "/fusion.wire.v1.Peer/Exchange")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert handlers.served == []


def test_a_certificate_of_another_cluster_under_the_same_ca_is_refused(served, ca):
    address, server, _, clock, _ = served
    other = dataclasses.replace(ca, cluster=ClusterId("zzzzzzzzzz"))
    stranger = other.new_credentials(Role.NODE, "s", "", clock.wall_s())
    with open_channel(address, server, stranger) as channel, pytest.raises(grpc.RpcError, match="of cluster zzz"):
        call(channel, "/fusion.wire.v1.Peer/Exchange")


def test_a_peer_is_proved_by_name_not_by_address(served, ca):
    address, _, _, clock, _ = served
    caller = ca.new_credentials(Role.NODE, "caller", "", clock.wall_s())
    someone_else = ca.new_credentials(Role.NODE, "else", "", clock.wall_s())
    with open_channel(address, someone_else, caller) as channel, pytest.raises(grpc.RpcError) as caught:
        call(channel, "/fusion.wire.v1.Peer/Exchange")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_grpc_gets_a_configuration_once_and_again_only_after_a_renewal(ca, monkeypatch):
    """Each one makes grpc free what handshakes of other threads use, which ended coordinators of 1,000 nodes."""
    given = {}

    def keep(initial, fetcher, *, require_client_authentication):
        given.update(initial=initial, fetcher=fetcher)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", keep)
    now_s = SystemClock().wall_s()
    current = [ca.new_credentials(Role.NODE, "server", "", now_s)]
    server_credentials(lambda: current[-1])
    assert isinstance(given["initial"], grpc.ServerCertificateConfiguration)
    assert [given["fetcher"]() for _ in range(3)] == [None] * 3
    current.append(dataclasses.replace(current[0]))  # read again from files that were touched, not changed
    assert given["fetcher"]() is None
    current.append(ca.new_credentials(Role.NODE, "server", "", now_s))
    assert isinstance(given["fetcher"](), grpc.ServerCertificateConfiguration)
    assert given["fetcher"]() is None


def test_new_connections_get_a_renewed_certificate(ca, tmp_path):
    import os

    now_s = SystemClock().wall_s()
    old = ca.new_credentials(Role.NODE, "server", "", now_s)
    old.save(tmp_path)
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([EveryMethod()])
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tmp_path))
    server.start()
    try:
        caller = ca.new_credentials(Role.NODE, "caller", "", now_s)
        seen = []
        for _ in range(2):
            with open_channel(f"127.0.0.1:{port}", old, caller) as channel:
                call(channel, "/fusion.wire.v1.Peer/Exchange")
            import socket
            import ssl

            context = ssl.create_default_context(cadata=ca.pem.decode())
            context.load_cert_chain(*_files(caller, tmp_path / "caller"))
            context.set_alpn_protocols(["h2"])
            name = node_server_name(CLUSTER, old.identity)
            with (
                socket.create_connection(("127.0.0.1", port)) as raw,
                context.wrap_socket(raw, server_hostname=name) as tls,
            ):
                seen.append(tls.getpeercert(binary_form=True))
            from fusion.security.credentials import load_key

            fresh = ca.issue(load_key(old.key_pem).public_key(), Role.NODE, now_s + 60)
            dataclasses.replace(old, certificate_pem=fresh).save(tmp_path)
            os.utime(tmp_path / "certificate.pem", ns=(1, 2))
        assert seen[0] != seen[1]
    finally:
        server.stop(None).wait()


def _files(credentials, directory):
    credentials.save(directory)
    return directory / "certificate.pem", directory / "key.pem"
