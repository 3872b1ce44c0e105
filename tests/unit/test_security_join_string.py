"""Join strings: what they carry, and how each way of spoiling one is told apart (B11)."""

from __future__ import annotations

import pytest

from fusion.base.errors import ConfigError
from fusion.base.ids import ClusterId
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role
from fusion.security.enrolment import make_join_string, parse_join_string

CLUSTER = ClusterId("abcdefghij")


@pytest.fixture(scope="module")
def ca():
    return CertificateAuthority.create(CLUSTER, 1_800_000_000.0)


@pytest.fixture(scope="module")
def text(ca):
    return make_join_string(
        cluster=CLUSTER,
        role=Role.NODE,
        addresses=["192.0.2.7:7443", "[fd00::1]:7443"],
        enrol_port=7444,
        token_id="tok-abcdefghij",
        secret=bytes(range(32)),
        expires_wall_s=1_800_000_900.0,
        ca_der=ca.der,
    )


def test_what_goes_in_comes_out(ca, text):
    join = parse_join_string(text)
    assert join.cluster == CLUSTER
    assert join.role is Role.NODE
    assert join.addresses == ("192.0.2.7:7443", "[fd00::1]:7443")
    assert (join.enrol_port, join.token_id, join.secret) == (7444, "tok-abcdefghij", bytes(range(32)))
    assert (join.expires_wall_s, join.ca_der, join.ca_pem) == (1_800_000_900.0, ca.der, ca.pem)


def test_it_is_one_word_that_survives_being_wrapped(text):
    assert len(text.split()) == 1
    assert len(text) < 1500
    wrapped = "  " + "\n".join(text[i : i + 60] for i in range(0, len(text), 60)) + "\r\n"
    assert parse_join_string(wrapped) == parse_join_string(text)


def test_each_damage_has_its_own_message(text):
    changed = text[:100] + ("A" if text[100] != "A" else "B") + text[101:]
    messages = set()
    for bad in (text[:-3], text[: len(text) // 2], changed, "fusion-join-2." + text[14:], "hello", ""):
        with pytest.raises(ConfigError) as caught:
            parse_join_string(bad)
        assert "\n" not in str(caught.value)
        messages.add(str(caught.value))
    assert any("end is missing" in message for message in messages)
    assert any("character in it was changed" in message for message in messages)
    assert any("upgrade" in message for message in messages)
    assert any("is none" in message for message in messages)


def test_no_changed_or_cut_text_is_ever_taken_for_another_join_string(text):
    for position in range(0, len(text), 7):
        for bad in (text[:position], text[:position] + "~" + text[position + 1 :]):
            with pytest.raises(ConfigError):
                parse_join_string(bad)
