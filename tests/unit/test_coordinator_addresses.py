"""Addresses that nodes may state, and where calls come from."""

from __future__ import annotations

import pytest

from fusion.base.address import join_address, split_address
from fusion.base.errors import ConfigError
from fusion_coordinator.addresses import check_stated, host_of_peer


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7445", "10.0.0.1", 7445),
        ("train.example.org:1", "train.example.org", 1),
        ("[fd00::1]:65535", "fd00::1", 65535),
        ("localhost:0", "localhost", 0),
    ],
)
def test_addresses_are_split_and_joined(text, host, port):
    assert split_address("x", text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":80",
        "host:-1",
        "host:65536",
        "host:8o",
        "ho st:80",
        "fd00::1:80",
        "[fd00::1",
        "a/b:80",
        "host:80:90",
        "[host]:80",
        "host:٣",
        "-x:80",
        "a\nb:80",
    ],
)
def test_b9_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"^listen"):
        split_address("listen", text)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:55000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:55000", "::1"),
        ("ipv6:[fd00::7]:55000", "fd00::7"),
        ("ipv6:[::ffff:10.0.0.1]:55000", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::1"),
        ("unix:/tmp/x", ""),
        ("ipv4:junk", ""),
    ],
)
def test_the_callers_host_is_read_from_grpcs_name_for_it(peer, host):
    assert host_of_peer(peer) == host


def test_p22_loopback_is_an_address_only_for_callers_from_loopback():
    assert check_stated("address", "127.0.0.1:7445", "127.0.0.1") == ("127.0.0.1", 7445)
    assert check_stated("address", "[::1]:7445", "::1") == ("::1", 7445)
    for text in ("127.0.0.1:7445", "127.8.8.8:1", "[::1]:7445", "localhost:7445", "[::ffff:127.0.0.1]:7445"):
        with pytest.raises(ConfigError, match="reachable only on the node itself"):
            check_stated("address", text, "10.0.0.7")


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0:1",
        "[::]:1",
        "169.254.169.254:80",
        "[fe80::1]:1",
        "[fe80::1%eth0]:1",
        "255.255.255.255:1",
        "224.0.0.1:1",
        "[ff02::1]:1",
        "100.100.100.200:80",
        "[fd00:ec2::254]:80",
        "[::ffff:169.254.169.254]:80",
        "10.0.0.1:0",
    ],
)
def test_t15_addresses_that_are_no_machine_or_a_trap_are_refused(text):
    with pytest.raises(ConfigError, match=r"^address"):
        check_stated("address", text, "10.0.0.7")


def test_private_and_public_addresses_and_names_are_fine():
    for text in (
        "10.0.0.1:7445",
        "192.168.1.2:7445",
        "203.0.113.5:7445",
        "[fd00::1]:7445",
        "gpu-7.lab.example.org:7445",
    ):
        assert check_stated("address", text, "198.51.100.1")
