"""Who gets in: enrolment, roles, certificates, addresses - against a real coordinator process."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import grpc
import pytest

from fusion.base.errors import AuthError, ConfigError, UnreachableError
from fusion.security.ca import VALID_S, CertificateAuthority
from fusion.security.credentials import Credentials, Role, key_to_pem, load_key, make_csr, new_key
from fusion.security.enrolment import enrol, parse_join_string, renew_expired
from fusion.security.roles import METHOD_ROLES
from fusion.security.tls import caller_of_certificate, coordinator_server_name
from fusion.wire.v1 import coordinator_pb2, enrolment_pb2, enrolment_pb2_grpc, node_pb2
from tests.support.coordinator import CoordinatorProcess, FakeNode, FakeOwner, request_id, stubs, wait_until


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    with CoordinatorProcess(tmp_path_factory.mktemp("access") / "state") as process:
        yield process
        assert process.process.poll() is None, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture(scope="module")
def admin(coordinator):
    with coordinator.channel(coordinator.admin()) as channel:
        yield stubs(channel).admin


def token(admin, role="node", valid_s=60.0):
    request = coordinator_pb2.CreateTokenRequest(request_id=request_id(), role=role, valid_s=valid_s)
    return parse_join_string(admin.CreateToken(request, timeout=10).join_string)


# ---- roles ----


def try_method(channel, method, timeout_s=5):
    """Call a method with an empty message (or none, for a stream); return the status code."""
    streams_in = method.endswith(("Blobs/Put", "Peer/Exchange"))
    streams_out = method.endswith(("NodeControl/Watch", "Jobs/Follow", "Blobs/Get", "Peer/Exchange"))
    kind = "_".join("stream" if flag else "unary" for flag in (streams_in, streams_out))
    stub = getattr(channel, kind)(method)
    try:
        answer = stub(iter([b""]) if streams_in else b"", timeout=timeout_s)
        if streams_out:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", list(Role))
def test_t8_every_method_is_refused_to_every_role_that_has_no_business_with_it(coordinator, role):
    with coordinator.channel(coordinator.credentials(role)) as channel:
        for method, roles in METHOD_ROLES.items():
            code = try_method(channel, method)
            if method.startswith(("/fusion.wire.v1.Peer/", "/fusion.wire.v1.Probe/", "/fusion.wire.v1.Enrolment/")):
                assert code is grpc.StatusCode.UNIMPLEMENTED, method  # not served on this port
            elif role in roles:
                assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), method
                assert code is not grpc.StatusCode.INTERNAL, method
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, method


def test_t8_without_a_certificate_of_the_cluster_no_method_is_reached(coordinator):
    name = coordinator_server_name(coordinator.config.cluster)
    foreign = CertificateAuthority.create(coordinator.config.cluster, time.time())
    stranger = dataclasses.replace(foreign.new_credentials(Role.ADMIN, "x", "", time.time()), ca_pem=coordinator.ca.pem)
    nobody = grpc.ssl_channel_credentials(coordinator.ca.pem)
    options = [("grpc.ssl_target_name_override", name)]
    for channel in (
        grpc.secure_channel(coordinator.address, nobody, options),
        grpc.insecure_channel(coordinator.address),
        coordinator.channel(stranger),
    ):
        with channel:
            for method in ("/fusion.wire.v1.Admin/Info", "/fusion.wire.v1.Jobs/List"):
                assert try_method(channel, method) is grpc.StatusCode.UNAVAILABLE
    with coordinator.channel(coordinator.admin()) as channel:
        assert try_method(channel, "/fusion.wire.v1.Admin/Info") is grpc.StatusCode.OK


def test_t9_nothing_but_the_two_ports_is_open(coordinator):
    import psutil

    listening = {
        f"{item.laddr.ip.removeprefix('::ffff:')}:{item.laddr.port}"
        for item in psutil.Process(coordinator.process.pid).net_connections("inet")
        if item.status == psutil.CONN_LISTEN
    }
    assert listening == {coordinator.address, coordinator.enrol_address}


def test_t20_a_revoked_node_is_out_at_once(coordinator, admin):
    node = FakeNode(coordinator, "revoked").join()
    request = coordinator_pb2.RevokeRequest(request_id=request_id(), identity=node.identity)
    admin.Revoke(request, timeout=10)
    with pytest.raises(grpc.RpcError, match="was revoked") as caught:
        node.beat()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    wait_until(lambda: node.watch_error is not None, "its Watch stream ends")
    other = FakeNode(coordinator, "other").join()
    assert node.identity in other.beat().revoked
    with pytest.raises(grpc.RpcError, match="is not known"):
        admin.Revoke(coordinator_pb2.RevokeRequest(request_id=request_id(), identity="nobody"), timeout=10)
    node.die()
    other.die()


@pytest.mark.slow
def test_t20_an_expired_certificate_ends_an_open_connection(coordinator):
    key = new_key()
    short = coordinator.ca.issue(key.public_key(), Role.OWNER, time.time(), valid_s=1.5)
    credentials = dataclasses.replace(
        coordinator.ca.new_credentials(Role.OWNER, "short", "", time.time()),
        certificate_pem=short,
        key_pem=key_to_pem(key),
    )
    with coordinator.channel(credentials) as channel:
        assert try_method(channel, "/fusion.wire.v1.Jobs/List") is grpc.StatusCode.OK
        time.sleep(2.6)
        with pytest.raises(grpc.RpcError, match="certificate expired") as caught:
            stubs(channel).jobs.List(coordinator_pb2.ListJobsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_node_renews_its_certificate_with_its_own_key_only(coordinator):
    node = FakeNode(coordinator, "renewing")
    csr = make_csr(load_key(node.credentials.key_pem))
    answer = node.stub.Renew(node_pb2.RenewRequest(csr_der=csr), timeout=10)
    renewed = caller_of_certificate(answer.certificate_pem)
    assert (renewed.identity, renewed.role) == (node.identity, Role.NODE)
    dataclasses.replace(node.credentials, certificate_pem=answer.certificate_pem).check(time.time())
    with pytest.raises(grpc.RpcError, match="another key") as caught:
        node.stub.Renew(node_pb2.RenewRequest(csr_der=make_csr(new_key())), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    node.die()


# ---- enrolment ----


def test_t18_a_token_lets_one_machine_in_once(coordinator, admin):
    join = token(admin)
    credentials = enrol(join, "n0")
    assert (credentials.role, credentials.name, credentials.coordinator) == (Role.NODE, "n0", coordinator.address)
    credentials.check(time.time())
    node = FakeNode(coordinator, "n0", credentials=credentials)
    assert node.register().incarnation > 0
    node.die()
    with pytest.raises(AuthError, match="was used by another machine"):
        enrol(join, "n1")


def test_t18_a_lost_answer_is_given_again_to_the_same_key_only(coordinator, admin):
    join, csr = token(admin), make_csr(new_key())
    options = [("grpc.ssl_target_name_override", coordinator_server_name(join.cluster))]
    with grpc.secure_channel(coordinator.enrol_address, grpc.ssl_channel_credentials(join.ca_pem), options) as channel:
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        request = enrolment_pb2.EnrolRequest(token_id=join.token_id, secret=join.secret, csr_der=csr, name="n0")
        first, second = stub.Enrol(request, timeout=10), stub.Enrol(request, timeout=10)
        assert first.identity == second.identity
        for field, value in (("secret", b"x" * 32), ("token_id", "tok-unknown"), ("csr_der", make_csr(new_key()))):
            bad = enrolment_pb2.EnrolRequest()
            bad.CopyFrom(request)
            setattr(bad, field, value)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Enrol(bad, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for field, value in (("name", "<img src=x>"), ("name", "x" * 64), ("csr_der", b"junk")):
            bad.CopyFrom(request)
            setattr(bad, field, value)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Enrol(bad, timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            stub.Enrol(enrolment_pb2.EnrolRequest(name="x" * 20_000), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert try_method(channel, "/fusion.wire.v1.Admin/Info") is grpc.StatusCode.UNIMPLEMENTED


def off_since(coordinator, days, *, role=Role.NODE, ca=None):
    """Credentials of somebody whose certificate ended so long ago."""
    begin_s = time.time() - VALID_S[role] - days * 86_400
    made = (ca or coordinator.ca).new_credentials(role, "n0", coordinator.address, begin_s)
    return dataclasses.replace(made, enrol_port=int(coordinator.enrol_address.rpartition(":")[2]))


def test_a_node_that_was_off_while_its_certificate_expired_gets_a_new_one_for_its_key(coordinator):
    old = off_since(coordinator, 6.9)
    assert old.expired_but_renewable(time.time())
    renewed = renew_expired(old)
    assert (renewed.key_pem, renewed.identity) == (old.key_pem, old.identity)
    renewed.check(time.time())
    node = FakeNode(coordinator, "n0", credentials=renewed)
    assert node.register().incarnation > 0
    node.die()


def test_a_node_that_is_certified_still_may_ask_too(coordinator):
    renew_expired(off_since(coordinator, -0.5)).check(time.time())


def test_nobody_else_gets_a_certificate_for_an_expired_one(coordinator, admin):
    late = off_since(coordinator, 7.1)
    assert not late.expired_but_renewable(time.time())
    with pytest.raises(AuthError, match=r"expired 7 days ago, a new one is given for up to 7 days; join again"):
        renew_expired(late)
    with pytest.raises(AuthError, match="only nodes"):
        renew_expired(off_since(coordinator, 2.0, role=Role.OWNER))
    with pytest.raises(AuthError, match="for another key"):
        renew_expired(dataclasses.replace(off_since(coordinator, 2.0), key_pem=key_to_pem(new_key())))
    foreign = off_since(coordinator, 2.0, ca=CertificateAuthority.create(coordinator.config.cluster, time.time()))
    with pytest.raises(AuthError, match="not of this cluster"):
        renew_expired(dataclasses.replace(foreign, ca_pem=coordinator.ca.pem))
    gone = enrol(token(admin), "gone")
    admin.Revoke(coordinator_pb2.RevokeRequest(request_id=request_id(), identity=gone.identity), timeout=10)
    with pytest.raises(AuthError, match="has been revoked"):
        renew_expired(dataclasses.replace(gone, enrol_port=off_since(coordinator, 0).enrol_port))


def test_b11_an_expired_token_says_so(admin):
    join = token(admin, valid_s=1.0)
    time.sleep(1.1)
    with pytest.raises(AuthError, match="token expired"):
        enrol(join, "n0")


def test_an_owner_token_makes_an_owner(coordinator, admin):
    credentials = enrol(token(admin, "owner"), "anna")
    assert credentials.role is Role.OWNER
    with coordinator.channel(credentials) as channel:
        stubs(channel).jobs.List(coordinator_pb2.ListJobsRequest(), timeout=10)
        answer = stubs(channel).admin.Info(coordinator_pb2.InfoRequest(), timeout=10)
        assert (answer.caller_identity, answer.caller_role) == (credentials.identity, "owner")
        with pytest.raises(grpc.RpcError, match="may not call"):
            token(stubs(channel).admin)
    for role in ("admin", "coordinator", "root", ""):
        with pytest.raises(grpc.RpcError, match="role must be one of node, owner"):
            token(admin, role)
    for valid_s in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(grpc.RpcError, match="valid_s must be"):
            token(admin, valid_s=valid_s)


def test_t19_the_secret_never_goes_to_a_server_of_another_ca(coordinator, admin, tmp_path):
    join = token(admin)
    with CoordinatorProcess(tmp_path / "other") as impostor:
        port = int(impostor.enrol_address.rpartition(":")[2])
        lured = dataclasses.replace(join, addresses=(impostor.address,), enrol_port=port)
        with pytest.raises(AuthError, match=r"CA mismatch.*the secret was not sent"):
            enrol(lured, "n0")
        assert "Enrol" not in impostor.log()
    assert enrol(join, "n0").role is Role.NODE


def test_an_address_that_does_not_answer_is_passed_over_and_named_if_there_is_no_other(admin):
    join = token(admin)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        refused = dataclasses.replace(join, addresses=(dead,), enrol_port=closed.getsockname()[1])
        with pytest.raises(UnreachableError, match=f"no coordinator answers at {dead}"):
            enrol(refused, "n0")
    assert enrol(dataclasses.replace(join, addresses=("127.0.0.2:1", *join.addresses)), "n0").role is Role.NODE


def test_enrolment_is_slowed_down_for_whoever_insists(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"enrolments_per_s": 0.001, "enrolment_burst": 3}) as coordinator:
        name = coordinator_server_name(coordinator.config.cluster)
        credentials = grpc.ssl_channel_credentials(coordinator.ca.pem)
        options = [("grpc.ssl_target_name_override", name)]
        with grpc.secure_channel(coordinator.enrol_address, credentials, options) as channel:
            stub = enrolment_pb2_grpc.EnrolmentStub(channel)
            request = enrolment_pb2.EnrolRequest(token_id="t", secret=b"s", csr_der=make_csr(new_key()), name="n")
            codes = []
            for _ in range(5):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Enrol(request, timeout=10)
                codes.append(caught.value.code().name)
        assert codes == ["UNAUTHENTICATED"] * 3 + ["RESOURCE_EXHAUSTED"] * 2


# ---- registration and addresses ----


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:7445", "not the address of a machine"),
        ("[::]:7445", "not the address of a machine"),
        ("169.254.169.254:80", "metadata"),
        ("[fe80::1]:7445", "link-local"),
        ("224.0.0.1:7445", "not the address of a machine"),
        ("10.0.0.1:0", "1..65535"),
        ("10.0.0.1:70000", "must be 0..65535"),
        ("10.0.0.1", "must be 0..65535"),
        ("x" * 300 + ":1", "is not HOST:PORT"),
        ("http://10.0.0.1:80", "must be 0..65535"),
        ("10.0.0.1 :80", "is not HOST:PORT"),
    ],
)
def test_b29_t15_an_address_that_no_peer_could_use_is_refused(coordinator, address, message):
    node = FakeNode(coordinator, "badaddress")
    with pytest.raises(grpc.RpcError, match=message) as caught:
        node.register(address)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    node.die()


@pytest.mark.parametrize(
    ("hardware", "field"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_bytes": 2**60}, "memory_bytes"),
        ({"flops": 0.0}, "flops"),
        ({"flops": -1.0}, "flops"),
        ({"flops": float("nan")}, "flops"),
        ({"flops": 1e30}, "flops"),
        ({"threads": 0}, "threads"),
        ({"device": "cpu\x1b[2J"}, "device"),
        ({"platform": "x" * 5000}, "platform"),
    ],
)
def test_b29_figures_that_no_machine_has_are_refused(coordinator, hardware, field):
    node = FakeNode(coordinator, "badfigures", **hardware)
    with pytest.raises(grpc.RpcError, match=field) as caught:
        node.register()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        node.beat()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    node.die()


def test_b30_a_stale_incarnation_must_register_again_and_a_repeated_register_is_one(coordinator):
    node = FakeNode(coordinator, "twice")
    request = request_id()
    first = node.register(request_id=request).incarnation
    assert node.register(request_id=request).incarnation == first
    assert node.register().incarnation > first
    node.incarnation = first
    with pytest.raises(grpc.RpcError, match=f"stale incarnation {first}"):
        node.beat()
    with pytest.raises(grpc.RpcError, match=r"protocol: the node speaks 9"):
        node.register(protocol=9)
    node.die()


def probe(node, address, nonce=b"n" * 32):
    return node.stub.ProbeReachability(node_pb2.ProbeRequest(address=address, nonce=nonce), timeout=20)


def test_p1_a_node_learns_whether_it_can_be_reached(coordinator):
    node = FakeNode(coordinator, "probing")
    assert probe(node, "").seen_host == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer(content):
            connection, _ = server.accept()
            with connection:
                connection.sendall(content)

        for content, reachable in ((b"n" * 32, True), (b"m" * 32, False), (b"n" * 8, False)):
            thread = threading.Thread(target=answer, args=(content,))
            thread.start()
            found = probe(node, address)
            thread.join(10)
            assert found.reachable is reachable
            assert ("something else" in found.detail) is not reachable
    closed = probe(node, address)
    assert not closed.reachable
    assert "refused" in closed.detail
    node.die()


def test_t15_the_coordinator_does_not_connect_where_it_is_told_not_to(coordinator):
    node = FakeNode(coordinator, "curious")
    for address in ("169.254.169.254:80", "0.0.0.0:80", "[::ffff:169.254.169.254]:80", "100.100.100.200:80"):
        with pytest.raises(grpc.RpcError) as caught:
            probe(node, address)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="nonce"):
        probe(node, "127.0.0.1:80", b"short")
    node.die()


# ---- what comes in over the wire ----


def test_b13_b14_b16_malformed_and_oversized_calls_are_refused_and_hurt_nobody(coordinator):
    owner = FakeOwner(coordinator)
    raw = owner.channel.unary_unary("/fusion.wire.v1.Jobs/Submit")
    put = owner.channel.stream_unary("/fusion.wire.v1.Blobs/Put")
    for call in (lambda: raw(b"\xff\xff\xff", timeout=5), lambda: put(iter([b"\xff\xff\xff"]), timeout=5)):
        with pytest.raises(grpc.RpcError, match="cannot be parsed") as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        raw(b"\x0a" + b"x" * (5 * 2**20), timeout=5)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    zeros = owner.channel.unary_unary("/fusion.wire.v1.Jobs/Submit")
    with pytest.raises(grpc.RpcError) as caught:  # T11: 60 MiB that came as 60 kB
        zeros(bytes(60 * 2**20), timeout=20, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError):
        owner.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=5, metadata=[("x", "y" * 20_000)])
    owner.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=5)
    owner.close()


def test_b10_keys_that_others_can_read_stop_the_start(tmp_path):
    other = CoordinatorProcess(tmp_path / "state")
    (tmp_path / "state" / "ca-key.pem").chmod(0o644)
    with pytest.raises(AssertionError, match="chmod 600"):
        other.start()
    other.process.stdout.close()
    other.process.wait(10)
    other.process = None


def test_credentials_of_a_directory_that_holds_none_are_an_error(tmp_path):
    with pytest.raises(AuthError, match="join a cluster first"):
        Credentials.load(tmp_path)
    with pytest.raises(ConfigError, match="is none"):
        parse_join_string("hello")
