"""The cluster's certificate authority: one P-256 key that says which key is whom.

Whoever asks for a certificate proves a key and nothing else: all names in it are set here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fusion.base.errors import AuthError, WireError
from fusion.base.ids import ClusterId
from fusion.security.credentials import (
    Credentials,
    Role,
    check_private,
    identity_of,
    key_to_pem,
    load_key,
    new_key,
    write_file,
)

DAY_S = 86_400.0
CA_VALID_S = 3650 * DAY_S
VALID_S = {  #: by role; renewed when a third of it is left
    Role.NODE: 7 * DAY_S,
    Role.OWNER: 90 * DAY_S,
    Role.ADMIN: 365 * DAY_S,
    Role.COORDINATOR: 90 * DAY_S,
}
BACKDATE_S = 300.0  #: certificates are valid from that long ago, because clocks differ
MAX_CSR_BYTES = 4096


def server_name(cluster: ClusterId, identity: str) -> str:
    """Return the DNS name by which TLS proves that a server is `identity`; it needs no DNS."""
    return f"{identity}.{cluster}.fusion"


def uri_of(cluster: ClusterId, role: Role, identity: str) -> str:
    """Return the URI that a certificate states as its holder."""
    return f"fusion://{cluster}/{role}/{identity}"


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """The CA of one cluster, with its key."""

    cluster: ClusterId
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, cluster: ClusterId, wall_s: float) -> CertificateAuthority:
        """Make a new CA, valid for ten years, that may sign no further CAs."""
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fusion cluster {cluster}")])
        usage = _key_usage(digital_signature=True, key_cert_sign=True)
        builder = (
            _builder(name, name, key.public_key(), wall_s, CA_VALID_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(cluster, key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def load(cls, cluster: ClusterId, directory: Path) -> CertificateAuthority:
        """Read the CA that `save` wrote; AuthError if it is missing, damaged or readable by others."""
        try:
            check_private(directory / "ca-key.pem")
            key = load_key((directory / "ca-key.pem").read_bytes())
            certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise AuthError(f"the CA in {directory} cannot be used: {error}") from None
        return cls(cluster, key, certificate)

    def save(self, directory: Path) -> None:
        """Write key (readable by its owner only) and certificate."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(directory / "ca-key.pem", key_to_pem(self.key), 0o600)
        write_file(directory / "ca.pem", self.pem, 0o644)

    @property
    def pem(self) -> bytes:
        """The CA's certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        """The CA's certificate, as join strings carry it."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        role: Role,
        wall_s: float,
        *,
        valid_s: float | None = None,
        hosts: Sequence[str] = (),
    ) -> bytes:
        """Return a PEM certificate for `public_key`, from which the identity follows. `hosts` are added as they are."""
        identity = identity_of(public_key)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)])
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(uri_of(self.cluster, role, identity)),
            x509.DNSName(server_name(self.cluster, "coordinator" if role is Role.COORDINATOR else identity)),
            *(_general_name(host) for host in hosts),
        ]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in (Role.NODE, Role.COORDINATOR):
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(subject, self.certificate.subject, public_key, wall_s, valid_s or VALID_S[role])
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True, key_cert_sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.certificate.public_key()),  # type: ignore[arg-type]
                critical=False,
            )
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def has_issued(self, certificate_pem: bytes) -> bool:
        """Whether a certificate, valid or not any more, is of this CA."""
        try:
            x509.load_pem_x509_certificate(certificate_pem).verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    def new_credentials(
        self, role: Role, name: str, coordinator: str, wall_s: float, *, hosts: Sequence[str] = ()
    ) -> Credentials:
        """Make a key and a certificate for a party on this machine."""
        key = new_key()
        certificate = self.issue(key.public_key(), role, wall_s, hosts=hosts)
        identity = identity_of(key.public_key())
        return Credentials(self.cluster, identity, role, name, coordinator, key_to_pem(key), certificate, self.pem)


def read_csr(der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key that a certificate request proves to hold; WireError for anything but a sound P-256 request."""
    if not 0 < len(der) <= MAX_CSR_BYTES:
        raise WireError(f"csr_der has {len(der)} bytes; allowed are 1..{MAX_CSR_BYTES}")
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        identity_of(key)
        sound = request.is_signature_valid
    except Exception as error:  # noqa: BLE001  # the parser's errors have no common root below Exception
        raise WireError(f"csr_der is no certificate request for a P-256 key: {type(error).__name__}") from None
    if not sound or not isinstance(key, ec.EllipticCurvePublicKey):
        raise WireError("csr_der is not signed with its own key")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, wall_s: float, valid_s: float
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(wall_s, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=BACKDATE_S))
        .not_valid_after(now + timedelta(seconds=valid_s))
    )


def _key_usage(*, digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
