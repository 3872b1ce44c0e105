"""The CA, certificates and the files they are kept in."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from fusion.base.errors import AuthError, WireError
from fusion.base.ids import ClusterId
from fusion.security.ca import CertificateAuthority, read_csr
from fusion.security.credentials import Credentials, Role, identity_of, load_key, make_csr, new_key
from fusion.security.tls import caller_of_certificate

CLUSTER = ClusterId("abcdefghij")
NOW_S = 1_800_000_000.0


@pytest.fixture(scope="module")
def ca():
    return CertificateAuthority.create(CLUSTER, NOW_S)


@pytest.fixture
def node(ca):
    return ca.new_credentials(Role.NODE, "n0", "127.0.0.1:7443", NOW_S)


def test_the_ca_is_p256_lives_ten_years_and_may_sign_no_further_ca(ca):
    constraints = ca.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert isinstance(ca.certificate.public_key().curve, ec.SECP256R1)
    assert ca.certificate.not_valid_after_utc.timestamp() - NOW_S == 3650 * 86400


def test_a_node_certificate_states_the_names_that_the_coordinator_chose(node):
    certificate = x509.load_pem_x509_certificate(node.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"fusion://abcdefghij/node/{node.identity}"]
    assert names.get_values_for_type(x509.DNSName) == [f"{node.identity}.abcdefghij.fusion"]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_owner_certificate_cannot_be_used_as_a_server(ca):
    owner = ca.new_credentials(Role.OWNER, "me", "127.0.0.1:7443", NOW_S)
    certificate = x509.load_pem_x509_certificate(owner.certificate_pem)
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_the_coordinators_certificate_carries_its_hosts(ca):
    coordinator = ca.new_credentials(
        Role.COORDINATOR, "coordinator", "", NOW_S, hosts=["train.example.org", "10.0.0.7", "fd00::7"]
    )
    names = (
        x509.load_pem_x509_certificate(coordinator.certificate_pem)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    assert names.get_values_for_type(x509.DNSName) == ["coordinator.abcdefghij.fusion", "train.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.7"),
        ipaddress.ip_address("fd00::7"),
    ]


def test_an_identity_is_a_hash_of_the_public_key(node):
    key = load_key(node.key_pem).public_key()
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert node.identity == base64.b32encode(hashlib.sha256(der).digest())[:20].decode().lower()


def test_certificates_are_valid_from_five_minutes_ago_and_as_long_as_their_role_lives(ca, node):
    certificate = x509.load_pem_x509_certificate(node.certificate_pem)
    assert NOW_S - certificate.not_valid_before_utc.timestamp() == 300
    assert certificate.not_valid_after_utc.timestamp() - NOW_S == 7 * 86400
    owner = ca.new_credentials(Role.OWNER, "me", "", NOW_S)
    assert caller_of_certificate(owner.certificate_pem).valid_until_s - NOW_S == 90 * 86400


def test_saved_credentials_come_back_and_the_key_is_private(node, tmp_path):
    node.save(tmp_path / "node")
    assert Credentials.load(tmp_path / "node") == node
    assert (tmp_path / "node" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (tmp_path / "node").iterdir()) == [
        "ca.pem",
        "certificate.pem",
        "identity.json",
        "key.pem",
    ]


def test_a_key_that_others_can_read_is_refused(node, tmp_path):
    node.save(tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        Credentials.load(tmp_path)


def test_missing_and_damaged_credentials_say_what_to_do(node, tmp_path):
    with pytest.raises(AuthError, match="join a cluster first"):
        Credentials.load(tmp_path / "nothing")
    node.save(tmp_path)
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(AuthError, match="join again"):
        Credentials.load(tmp_path)


def test_check_tells_the_real_cause_before_tls_hides_it(ca, node):
    node.check(NOW_S)
    with pytest.raises(AuthError, match="expired at 2027-01-22"):
        node.check(NOW_S + 7 * 86400 + 1)
    with pytest.raises(AuthError, match="clock"):
        node.check(NOW_S - 301)
    other = CertificateAuthority.create(CLUSTER, NOW_S)
    with pytest.raises(AuthError, match="not issued by this cluster's CA"):
        dataclasses.replace(node, ca_pem=other.pem).check(NOW_S)
    with pytest.raises(AuthError, match="do not belong together"):
        dataclasses.replace(node, key_pem=ca.new_credentials(Role.NODE, "x", "", NOW_S).key_pem).check(NOW_S)


def test_a_request_proves_its_key_and_names_nothing():
    key = new_key()
    assert identity_of(read_csr(make_csr(key))) == identity_of(key.public_key())


def test_requests_that_are_not_sound_p256_requests_are_refused():
    good = make_csr(new_key())
    rsa_key = rsa.generate_private_key(65537, 2048)
    rsa_csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(rsa_key, hashes.SHA256())
    p384 = ec.generate_private_key(ec.SECP384R1())
    p384_csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(p384, hashes.SHA256())
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for der in (
        b"",
        b"x" * 5000,
        good[:-10],
        bytes(flipped),
        rsa_csr.public_bytes(serialization.Encoding.DER),
        p384_csr.public_bytes(serialization.Encoding.DER),
    ):
        with pytest.raises(WireError, match="csr_der"):
            read_csr(der)


def _sign(ca, uris, key):
    names = [x509.UniformResourceIdentifier(uri) for uri in uris] or [x509.DNSName("x.fusion")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(ca.certificate.not_valid_before_utc)
        .not_valid_after(ca.certificate.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(ca.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_certificate_must_name_exactly_one_holder_that_fits_its_key(ca):
    key = new_key()
    me = identity_of(key.public_key())
    assert caller_of_certificate(_sign(ca, [f"fusion://abcdefghij/node/{me}"], key)).identity == me
    for uris in (
        [],
        [f"https://abcdefghij/node/{me}"],
        [f"fusion://abcdefghij/node/{me}", f"fusion://abcdefghij/admin/{me}"],
        [f"fusion://abcdefghij/root/{me}"],
        [f"fusion://abcdefghij/node/{me}/x"],
        [f"fusion://abcdefghij/node/{identity_of(new_key().public_key())}"],
    ):
        with pytest.raises(AuthError):
            caller_of_certificate(_sign(ca, uris, key))


def test_the_ca_is_loaded_only_with_a_private_key_file(ca, tmp_path):
    ca.save(tmp_path)
    assert CertificateAuthority.load(CLUSTER, tmp_path).pem == ca.pem
    (tmp_path / "ca-key.pem").chmod(0o640)
    with pytest.raises(AuthError, match="chmod 600"):
        CertificateAuthority.load(CLUSTER, tmp_path)
