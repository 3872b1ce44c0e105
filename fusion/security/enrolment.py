"""Join strings, and how a machine that holds one gets its credentials.

A join string carries the cluster's CA, so that the secret in it is only ever sent to a coordinator that has proved
itself; it needs no second channel and no first unverified connection.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fusion.base.address import join_address, split_address
from fusion.base.errors import AuthError, ConfigError, FusionError, UnreachableError
from fusion.base.ids import ClusterId, check_name
from fusion.security.credentials import Credentials, Role, identity_of, key_to_pem, load_key, make_csr, new_key
from fusion.security.tls import caller_of_certificate, coordinator_server_name

JOIN_VERSION = 1
SECRET_BYTES = 32
_PREFIX = "fusion-join-"
_CHECK_LENGTH = 8
_MAX_LENGTH = 8192
_CONNECT_TIMEOUT_S = 5.0
_ENROL_TIMEOUT_S = 10.0
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class JoinString:
    """What a join string says."""

    version: int
    cluster: ClusterId
    role: Role  #: what its holder will be
    addresses: tuple[str, ...]  #: host:port of the coordinator's mutual-TLS port, the likeliest first
    enrol_port: int  #: of the enrolment port, on the same hosts
    token_id: str
    secret: bytes
    expires_wall_s: float
    ca_der: bytes

    @property
    def ca_pem(self) -> bytes:
        """The cluster's CA certificate as PEM."""
        return x509.load_der_x509_certificate(self.ca_der).public_bytes(serialization.Encoding.PEM)


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    cluster: str
    role: Role
    addresses: tuple[str, ...]
    enrol_port: int
    token_id: str
    secret: bytes
    expires_wall_s: float
    ca_der: bytes


def make_join_string(
    *,
    cluster: ClusterId,
    role: Role,
    addresses: Sequence[str],
    enrol_port: int,
    token_id: str,
    secret: bytes,
    expires_wall_s: float,
    ca_der: bytes,
) -> str:
    """Return the text to hand to whoever shall join: "fusion-join-1.<base64url>.<check>"."""
    body = _Body(cluster, role, tuple(addresses), enrol_port, token_id, secret, expires_wall_s, ca_der)
    text = base64.urlsafe_b64encode(msgspec.json.encode(body)).decode().rstrip("=")
    return f"{_PREFIX}{JOIN_VERSION}.{text}.{_check(text)}"


def parse_join_string(text: str) -> JoinString:
    """Return what `text` says; ConfigError tells a truncated, a damaged and a newer join string apart."""
    text = "".join(text.split())
    if not text.startswith(_PREFIX) or len(text) > _MAX_LENGTH:
        raise ConfigError(f"join string: {text[:20]!r}... is none; it begins with {_PREFIX!r}")
    version, _, rest = text.removeprefix(_PREFIX).partition(".")
    if version != str(JOIN_VERSION):
        raise ConfigError(
            f"join string: its version is {version[:10]!r}, this program knows {JOIN_VERSION}; upgrade the older side"
        )
    encoded, _, check = rest.partition(".")
    if len(check) < _CHECK_LENGTH:
        raise ConfigError("join string: its end is missing; copy the whole line")
    if check != _check(encoded):
        raise ConfigError("join string: a character in it was changed; copy it again")
    try:
        body = msgspec.json.decode(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)), type=_Body)
        x509.load_der_x509_certificate(body.ca_der)
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"join string: its content is not usable: {error}") from None
    if not body.addresses or not 0 < body.enrol_port < 65536:
        raise ConfigError("join string: it names no address of the coordinator; make a new one there")
    for address in body.addresses:
        split_address("join string: address", address)
    return JoinString(JOIN_VERSION, ClusterId(body.cluster), *msgspec.structs.astuple(body)[1:])


def _check(encoded: str) -> str:
    return hashlib.sha256(encoded.encode()).hexdigest()[:_CHECK_LENGTH]


def enrol(join: JoinString, name: str, *, timeout_s: float = _CONNECT_TIMEOUT_S) -> Credentials:
    """Make a key and have the coordinator certify it. `name` is what people will call this machine.

    Tries the join string's addresses in turn. Raises AuthError if the token is refused or the coordinator is not the
    one that made it (the secret is then never sent), UnreachableError if no address answers within `timeout_s` each.
    """
    check_name("name", name)
    key = new_key()
    csr_der = make_csr(key)
    failures: list[FusionError] = []
    for address in join.addresses:
        host, _ = split_address("join string: address", address)
        enrol_address = join_address(host, join.enrol_port)
        try:
            _check_server(join, host, enrol_address, timeout_s)
        except FusionError as error:
            failures.append(error)
            continue
        certificate_pem = _call(join, enrol_address, name, csr_der)
        caller = caller_of_certificate(certificate_pem)
        if caller.cluster != join.cluster or caller.identity != identity_of(key.public_key()):
            raise AuthError(f"the coordinator at {enrol_address} certified somebody else; nothing was saved")
        return Credentials(
            join.cluster,
            caller.identity,
            caller.role,
            name,
            address,
            key_to_pem(key),
            certificate_pem,
            join.ca_pem,
            join.enrol_port,
        )
    raise _worst(failures)


def _worst(failures: list[FusionError]) -> FusionError:
    """A wrong CA tells more than an address that does not answer."""
    refused = [error for error in failures if isinstance(error, AuthError)]
    if refused or len(failures) == 1:
        return (refused or failures)[0]
    return UnreachableError("; ".join(str(error) for error in failures))


def _check_server(join: JoinString, host: str, address: str, timeout_s: float) -> None:
    """Prove the server before anything is said to it. gRPC would only report "handshake failed" for every cause."""
    context = ssl.create_default_context(cadata=join.ca_pem.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, join.enrol_port), timeout_s) as connection,
            context.wrap_socket(connection, server_hostname=coordinator_server_name(join.cluster)),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        raise AuthError(_certificate_problem(address, error)) from None
    except ssl.SSLError as error:
        raise UnreachableError(f"{address} does not speak TLS as a coordinator does: {error.reason}") from None
    except OSError as error:
        raise UnreachableError(
            f"no coordinator answers at {address}: {error.strerror or error}; check that it runs and its port is open"
        ) from None


def _certificate_problem(address: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in (9, 10):  # not yet valid, has expired
        return (
            f"the certificate of {address} is not valid by this machine's clock: {error.verify_message}; set the clock"
        )
    return (
        f"CA mismatch: {address} is not the coordinator that made this join string ({error.verify_message}); "
        "the secret was not sent; check the address, or make a new join string"
    )


def _call(join: JoinString, address: str, name: str, csr_der: bytes) -> bytes:
    """Send the request. A lost answer is asked for again: the same key gets the same answer."""
    from fusion.wire.v1 import enrolment_pb2

    request = enrolment_pb2.EnrolRequest(token_id=join.token_id, secret=join.secret, csr_der=csr_der, name=name)
    with _open(address, join.cluster, join.ca_pem) as stub:
        answer = _with_retries(lambda: stub.Enrol(request, timeout=_ENROL_TIMEOUT_S), address)
    return bytes(answer.certificate_pem)


def renew_expired(credentials: Credentials) -> Credentials:
    """Return a node's credentials with a new certificate for the same key, instead of one that has expired.

    AuthError if it has been too long, or the node was revoked; UnreachableError if nobody answers.
    """
    from fusion.wire.v1 import enrolment_pb2

    host, port = split_address("coordinator", credentials.coordinator)
    address = join_address(host, credentials.enrol_port or port + 1)
    csr_der = make_csr(load_key(credentials.key_pem))
    request = enrolment_pb2.RenewExpiredRequest(certificate_pem=credentials.certificate_pem, csr_der=csr_der)
    with _open(address, credentials.cluster, credentials.ca_pem) as stub:
        answer = _with_retries(lambda: stub.RenewExpired(request, timeout=_ENROL_TIMEOUT_S), address)
    renewed = replace(credentials, certificate_pem=bytes(answer.certificate_pem))
    renewed.check(time.time())
    return renewed


@contextmanager
def _open(address: str, cluster: ClusterId, ca_pem: bytes) -> Iterator[Any]:
    """Yield a stub for a coordinator's enrolment port."""
    import grpc

    from fusion.wire.v1 import enrolment_pb2_grpc

    server_name = coordinator_server_name(cluster)
    options = [
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.default_authority", server_name),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca_pem), options=options) as channel:
        yield enrolment_pb2_grpc.EnrolmentStub(channel)  # type: ignore[no-untyped-call]


def _with_retries(call: Callable[[], Any], address: str) -> Any:
    import grpc

    for attempt in range(_ATTEMPTS):
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(0.5 * 2**attempt)
                    continue
                raise UnreachableError(f"{address} broke off the enrolment: {error.details()}") from None
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise AuthError(error.details()) from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise UnreachableError(f"{address} takes no more enrolments now: {error.details()}") from None
            raise ConfigError(f"{address} refused the enrolment: {error.details()}") from None
    raise AssertionError("unreachable")
