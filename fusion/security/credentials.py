"""What a process needs to prove who it is: a key, a certificate of the cluster's CA, and that CA."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fusion.base.errors import AuthError
from fusion.base.ids import ClusterId

IDENTITY_LENGTH = 20
RENEWABLE_S = 7 * 86_400.0  #: after its end a node gets a new certificate for the old one


class Role(StrEnum):
    """What the holder of a certificate is to the cluster."""

    ADMIN = "admin"
    OWNER = "owner"
    NODE = "node"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Credentials:
    """One identity in one cluster. `load` and `save` keep it in a directory of its own."""

    cluster: ClusterId
    identity: str  #: base32(sha256(SPKI))[:20], lower case: it follows from the key
    role: Role
    name: str  #: what people call the machine or the person
    coordinator: str  #: host:port of the coordinator's mutual-TLS port
    key_pem: bytes
    certificate_pem: bytes
    ca_pem: bytes
    enrol_port: int = 0  #: of the coordinator, on the same host; 0: one further than its mutual-TLS port

    @classmethod
    def load(cls, directory: Path) -> Credentials:
        """Read the credentials in `directory`; AuthError says what is missing or wrong, and what to do."""
        try:
            about = msgspec.json.decode((directory / "identity.json").read_bytes(), type=_Identity)
            key_path = directory / "key.pem"
            check_private(key_path)
            key, certificate, ca = (
                path.read_bytes() for path in (key_path, directory / "certificate.pem", directory / "ca.pem")
            )
        except FileNotFoundError as error:
            raise AuthError(
                f"no credentials in {directory} ({error.filename} is missing); join a cluster first"
            ) from None
        except OSError as error:
            raise AuthError(f"credentials in {directory} cannot be read: {error}") from None
        except msgspec.DecodeError as error:
            raise AuthError(f"{directory / 'identity.json'} is not usable: {error}; join again") from None
        return cls(
            ClusterId(about.cluster),
            about.identity,
            about.role,
            about.name,
            about.coordinator,
            key,
            certificate,
            ca,
            about.enrol_port,
        )

    def save(self, directory: Path) -> None:
        """Write the credentials, each file whole or not at all; the key can be read by its owner only."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = _Identity(self.cluster, self.identity, self.role, self.name, self.coordinator, self.enrol_port)
        write_file(directory / "key.pem", self.key_pem, 0o600)
        write_file(directory / "certificate.pem", self.certificate_pem, 0o644)
        write_file(directory / "ca.pem", self.ca_pem, 0o644)
        write_file(directory / "identity.json", msgspec.json.format(msgspec.json.encode(about)) + b"\n", 0o644)

    def expired_but_renewable(self, wall_s: float) -> bool:
        """Whether the certificate is too old to be used, and not too old for a new one without a token."""
        end_s = x509.load_pem_x509_certificate(self.certificate_pem).not_valid_after_utc.timestamp()
        return end_s < wall_s < end_s + RENEWABLE_S

    def check(self, wall_s: float) -> None:
        """Raise AuthError with the real cause if a peer would refuse this certificate at `wall_s`.

        TLS itself tells the refused side nothing but "connection closed", so callers check before they connect.
        """
        try:
            certificate = x509.load_pem_x509_certificate(self.certificate_pem)
            ca = x509.load_pem_x509_certificate(self.ca_pem)
            key = load_key(self.key_pem)
        except ValueError as error:
            raise AuthError(f"the credentials of {self.name} cannot be read: {error}; join again") from None
        if spki(key.public_key()) != spki(certificate.public_key()):
            raise AuthError(f"key.pem and certificate.pem of {self.name} do not belong together; join again")
        try:
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature):
            raise AuthError(f"the certificate of {self.name} was not issued by this cluster's CA; join again") from None
        check_validity(certificate, wall_s, f"the certificate of {self.name}")


class _Identity(msgspec.Struct, frozen=True):
    cluster: str
    identity: str
    role: Role
    name: str
    coordinator: str
    enrol_port: int = 0


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 key in `pem`; ValueError if it is none."""
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not a P-256 key")
    return key


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return `key` as unencrypted PKCS8."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def spki(public_key: object) -> bytes:
    """Return the DER SubjectPublicKeyInfo of a public key; ValueError unless it is a P-256 key."""
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise ValueError("the public key is not a P-256 key")
    return public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def identity_of(public_key: object) -> str:
    """Return the identity that a public key stands for: base32(sha256(SPKI))[:20], lower case."""
    return base64.b32encode(hashlib.sha256(spki(public_key)).digest()).decode().lower()[:IDENTITY_LENGTH]


def make_csr(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a DER certificate request for `key`. It names nothing: the coordinator sets all names."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def check_validity(certificate: x509.Certificate, wall_s: float, what: str) -> None:
    """Raise AuthError unless `certificate` is valid at `wall_s`."""
    begin = certificate.not_valid_before_utc.timestamp()
    end = certificate.not_valid_after_utc.timestamp()
    if wall_s > end:
        raise AuthError(f"{what} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC; join again")
    if wall_s < begin:
        late_s = begin - wall_s
        raise AuthError(f"{what} is valid only in {late_s:.0f} s; check this machine's clock")


def check_private(path: Path) -> None:
    """Raise AuthError if others than its owner may read `path`."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise AuthError(f"{path} may be read by others (mode {mode:04o}); run: chmod 600 {path}")


def write_file(path: Path, content: bytes, mode: int) -> None:
    """Write `path` whole or not at all, and durably: a temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
