"""When a certificate is renewed, and what is done with an answer that is no good."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
from cryptography import x509

from fusion.base.errors import AuthError
from fusion.security.ca import BACKDATE_S, VALID_S, CertificateAuthority
from fusion.security.credentials import Role, load_key
from fusion_node.renewal import renew_once, renewal_wall_s
from tests.support.node import CLUSTER


class Control:
    """Signs requests with a CA."""

    def __init__(self, ca: CertificateAuthority) -> None:
        self.ca = ca

    async def renew(self, csr_der: bytes) -> bytes:
        key: Any = x509.load_der_x509_csr(csr_der).public_key()
        return self.ca.issue(key, Role.NODE, time.time())


def test_renewal_is_due_at_two_thirds_of_the_life_give_or_take_a_tenth():
    begin_s = 1_800_000_000.0
    ca = CertificateAuthority.create(CLUSTER, begin_s)
    key = load_key(ca.new_credentials(Role.NODE, "n", "", begin_s).key_pem).public_key()
    pem = ca.issue(key, Role.NODE, begin_s, valid_s=3000.0 - BACKDATE_S)  # it begins earlier, in all 3000 s
    start_s = begin_s - BACKDATE_S
    assert renewal_wall_s(pem, 0.0) == pytest.approx(start_s + 2000.0)
    assert renewal_wall_s(pem, -1.0) == pytest.approx(start_s + 1800.0)
    assert renewal_wall_s(pem, 1.0) == pytest.approx(start_s + 2200.0)


def test_the_key_and_with_it_the_identity_stay_the_same():
    ca = CertificateAuthority.create(CLUSTER, time.time())
    before = ca.new_credentials(Role.NODE, "n", "c:1", time.time())
    after = asyncio.run(renew_once(before, Control(ca), time.time()))  # type: ignore[arg-type]
    assert after.certificate_pem != before.certificate_pem
    assert (after.key_pem, after.identity, after.ca_pem) == (before.key_pem, before.identity, before.ca_pem)


def test_a_certificate_of_another_ca_is_not_taken():
    ca, other = (CertificateAuthority.create(CLUSTER, time.time()) for _ in range(2))
    before = ca.new_credentials(Role.NODE, "n", "c:1", time.time())
    with pytest.raises(AuthError, match="not issued by this cluster's CA"):
        asyncio.run(renew_once(before, Control(other), time.time()))  # type: ignore[arg-type]


def test_a_certificate_that_has_expired_is_renewed_at_the_port_that_asks_for_none(monkeypatch: pytest.MonkeyPatch):
    begin_s = time.time() - VALID_S[Role.NODE] - 86_400
    ca = CertificateAuthority.create(CLUSTER, begin_s)
    old = ca.new_credentials(Role.NODE, "n", "c:1", begin_s)
    new = dataclasses.replace(old, certificate_pem=ca.issue(load_key(old.key_pem).public_key(), Role.NODE, time.time()))
    monkeypatch.setattr("fusion_node.renewal.renew_expired", lambda found: new if found == old else None)
    assert asyncio.run(renew_once(old, Control(ca), time.time())) == new  # type: ignore[arg-type]
