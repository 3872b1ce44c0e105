"""TLS credentials for gRPC on both ends, and who the other end is.

A server is verified by name: whatever address was dialled, its certificate must carry the name of the
identity that the caller means to reach (`ssl_target_name_override`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from fusion.base.errors import AuthError
from fusion.base.ids import ClusterId
from fusion.security.ca import server_name
from fusion.security.credentials import Credentials, Role, identity_of

CredentialsSource = Credentials | Path | Callable[[], Credentials]  #: a directory is read again when its files change


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is on the other end of a call, by its certificate."""

    cluster: ClusterId
    role: Role
    identity: str
    valid_from_s: float  #: wall clock
    valid_until_s: float


def coordinator_server_name(cluster: ClusterId) -> str:
    """Return the TLS name of a cluster's coordinator."""
    return server_name(cluster, "coordinator")


def node_server_name(cluster: ClusterId, node: str) -> str:
    """Return the TLS name of a node."""
    return server_name(cluster, node)


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Return what a client needs to call a server of its cluster."""
    return grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.certificate_pem)


def server_credentials(source: CredentialsSource, *, client_certificate: bool = True) -> grpc.ServerCredentials:
    """Return what a server needs; new connections get a renewed certificate if `source` is a directory or a function.

    Without `client_certificate` anyone may connect: only the enrolment port does that. One result is for one port: a
    second one would be told that nothing has changed before it has got anything.
    """
    fetch, lock = _fetcher(source), threading.Lock()
    given = fetch()

    def configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
        ca = credentials.ca_pem if client_certificate else None
        return grpc.ssl_server_certificate_configuration([(credentials.key_pem, credentials.certificate_pem)], ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before every handshake, on several threads; None: go on with what you have.

        With a configuration it frees what other threads' handshakes may be about to use (grpc issue 22489): with one
        for every handshake, hundreds of nodes that connect at once end the process. So only a renewal gives one.
        """
        nonlocal given
        with lock:
            now = fetch()
            if now == given:
                return None
            given = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        configuration(given),
        changed,  # type: ignore[arg-type]  # the stubs lack the None that grpc documents
        require_client_authentication=client_certificate,
    )


def _fetcher(source: CredentialsSource) -> Callable[[], Credentials]:
    if isinstance(source, Credentials):
        return lambda: source
    if not isinstance(source, Path):
        return source
    cache: dict[str, Any] = {}

    def fetch() -> Credentials:
        changed = (source / "certificate.pem").stat().st_mtime_ns
        if cache.get("changed") != changed:
            cache["changed"], cache["credentials"] = changed, Credentials.load(source)
        loaded: Credentials = cache["credentials"]
        return loaded

    return fetch


def caller(context: Any) -> Caller:
    """Return who calls, from the context of an RPC of either gRPC API; AuthError if the certificate does not say."""
    pems = context.auth_context().get("x509_pem_cert")
    if not pems:
        raise AuthError("this call needs a client certificate of the cluster")
    pem = pems[0] if isinstance(pems, list | tuple) else pems
    return caller_of_certificate(bytes(pem))


@lru_cache(maxsize=4096)
def caller_of_certificate(pem: bytes) -> Caller:
    """Return whom a verified certificate names; it must have exactly one URI, fusion://<cluster>/<role>/<identity>."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        identity = identity_of(certificate.public_key())
    except (ValueError, x509.ExtensionNotFound) as error:
        raise AuthError(f"the client certificate names nobody: {error}") from None
    if len(uris) != 1 or not uris[0].startswith("fusion://"):
        raise AuthError(f"the client certificate must have exactly one fusion:// name, it has {len(uris)} URIs")
    parts = uris[0].removeprefix("fusion://").split("/")
    if len(parts) != 3 or parts[1] not in tuple(Role) or parts[2] != identity:
        raise AuthError("the client certificate's fusion:// name is malformed or belongs to another key")
    return Caller(
        ClusterId(parts[0]),
        Role(parts[1]),
        identity,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )
