"""Cluster files: what they may say, and one line for each thing that is wrong."""

from __future__ import annotations

import pytest

from fusion.base.errors import ConfigError
from fusion.base.units import GIB, format_flops, parse_duration, parse_flops, parse_rate
from fusion.plan.cluster_file import LAN, parse_cluster
from fusion.plan.types import Link, Uplink

WHOLE = """
[[nodes]]
name = "atlas"
speed = "10T"
memory = "16GiB"
site = "berlin"
count = 2

[[nodes]]
name = "kyo"
speed = 5e11
memory = 4000000000
site = "tokyo"

[[nodes]]
name = "lone"
speed = "300 GFLOPS"
memory = "8 GB"

[[sites]]
name = "berlin"
rate = "10 Gbit/s"
delay = "0.2 ms"
uplink = "1 Gbit/s"
downlink = "2 Gbit/s"

[[links]]
between = ["berlin", "tokyo"]
rate = "100 Mbit/s"
rate_back = "20 Mbit/s"
delay = "120 ms"

[[links]]
between = ["atlas-2", "kyo"]
connect = false

[default]
rate = "8 Mbit/s"
delay = "1 s"
"""


def test_nodes_sites_links_uplinks_and_the_default_are_read() -> None:
    cluster = parse_cluster(WHOLE)
    one, two, kyo, lone = cluster.nodes
    assert [node.name for node in cluster.nodes] == ["atlas-1", "atlas-2", "kyo", "lone"]
    assert (one.flops, one.memory_bytes, one.site) == (1e13, 16 * GIB, "berlin")
    assert (kyo.flops, kyo.memory_bytes) == (5e11, 4_000_000_000)
    assert lone.memory_bytes == 8_000_000_000
    between = cluster.links.between
    assert between(one, two) == Link(1.25e9, 0.0002)
    assert between(one, kyo) == Link(12.5e6, 0.12)
    assert between(kyo, one) == Link(2.5e6, 0.12)
    assert between(two, kyo) is None
    assert between(kyo, two) is None
    assert between(lone, kyo) == Link(1e6, 1.0)
    assert cluster.links.uplinks == {"berlin": Uplink(125e6, 250e6)}


def test_links_are_scaled_as_a_whole_and_absent_ones_stay_absent() -> None:
    cluster = parse_cluster(WHOLE)
    one, two, kyo, lone = cluster.nodes
    slower = cluster.links.scaled(0.5, 2.0)
    assert slower.between(one, two) == Link(0.625e9, 0.0004)
    assert slower.between(one, kyo) == Link(6.25e6, 0.24)
    assert slower.between(two, kyo) is None
    assert slower.between(lone, kyo) == Link(0.5e6, 2.0)
    assert slower.uplinks == {"berlin": Uplink(62.5e6, 125e6)}
    assert cluster.links.scaled(0.5).between(one, kyo) == Link(6.25e6, 0.12)


def test_without_a_default_other_sites_cannot_be_reached_and_a_site_is_a_lan() -> None:
    text = '[[nodes]]\nname = "a"\nspeed = "1T"\nmemory = "1GiB"\nsite = "x"\ncount = 2\n'
    text += '[[nodes]]\nname = "b"\nspeed = "1T"\nmemory = "1GiB"\n'
    first, second, other = parse_cluster(text).nodes
    links = parse_cluster(text).links
    assert links.between(first, second) == LAN
    assert links.between(first, other) is None


def changed(old: str, new: str) -> str:
    assert old in WHOLE
    return WHOLE.replace(old, new, 1)


BAD = {
    "unknown key in a node": (changed("speed", "sped"), r"nodes\[1\]: unknown key 'sped'; did you mean 'speed'\?"),
    "unknown key at the top": (changed("[default]", "[defaults]"), r"unknown key 'defaults'; did you mean 'default'\?"),
    "a key like none": (changed("rate_back", "zzz"), r"unknown key 'zzz'; allowed: between, rate"),
    "no unit": (changed('"100 Mbit/s"', "100"), r"links\[1\].rate: '100' is no text with a unit; write for example"),
    "a rate in words": (changed('"100 Mbit/s"', '"fast"'), r"links\[1\].rate: 'fast' is not a rate"),
    "a negative rate": (changed('"100 Mbit/s"', '"-5 Mbit/s"'), "'-5 Mbit/s' is not a rate"),
    "no rate at all": (changed('rate = "100 Mbit/s"', ""), r"links\[1\].rate: missing; write for example rate = "),
    "a negative speed": (changed("5e11", "-5e11"), r"nodes\[2\].speed: '-500000000000.0' is not within 1 MFLOPS to"),
    "an absurd speed": (changed('"10T"', '"10000000T"'), r"nodes\[1\].speed: '10000000T' is not within"),
    "speed that is no number": (changed("5e11", "nan"), r"nodes\[2\].speed: 'nan' is not within"),
    "a negative memory": (changed("4000000000", "-1"), r"nodes\[2\].memory: '-1' is not within 1 MiB to 1 PiB"),
    "a byte of memory": (changed('"16GiB"', '"1"'), r"nodes\[1\].memory: '1' is not within 1 MiB"),
    "a delay of an hour": (changed('"120 ms"', '"60 min"'), r"links\[1\].delay: '60 min' is not within 0 ms to 1 min"),
    "a negative delay": (changed('"120 ms"', '"-1 ms"'), "'-1 ms' is not a duration"),
    "no nodes": ('[default]\nrate = "1 Gbit/s"', "it names no node"),
    "an unknown site": (
        changed('["berlin", "tokyo"]', '["berlin", "tokio"]'),
        "unknown site or node 'tokio'; did you mean 'tokyo'",
    ),
    "a node and a site": (changed('["atlas-2", "kyo"]', '["atlas-2", "tokyo"]'), "unknown site or node 'atlas-2'"),
    "a described site without nodes": (
        changed('name = "berlin"\nrate', 'name = "rome"\nrate'),
        "unknown site or node 'rome'",
    ),
    "two nodes of one name": (changed('"kyo"', '"atlas-1"'), "two nodes are named 'atlas-1'"),
    "a bad name": (changed('"kyo"', '"k yo"'), "is not a usable name"),
    "a name that is no text": (changed('"kyo"', "7"), r"nodes\[2\].name: it must be a text in quotes"),
    "a link stated twice": (changed('["atlas-2", "kyo"]', '["tokyo", "berlin"]'), "was stated before"),
    "one end": (changed('["atlas-2", "kyo"]', '["kyo"]'), "it must name two nodes or two sites"),
    "a rate without a connection": (changed("connect = false", 'connect = false\nrate = "1 Gbit/s"'), "has none"),
    "connect in words": (changed("connect = false", 'connect = "no"'), "connect: it must be true or false"),
    "a count of none": (changed("count = 2", "count = 0"), r"count: 0 must be a whole number of 1\.\.10000"),
    "a count of many": (changed("count = 2", "count = 99999"), "count: 99999 must be"),
    "a true count": (changed("count = 2", "count = true"), "count: True must be"),
    "a downlink alone": (changed('uplink = "1 Gbit/s"\n', ""), "it needs an uplink beside it"),
    "a site described twice": (WHOLE + '[[sites]]\nname = "berlin"\n', "'berlin' is described twice"),
    "a table instead of tables": (changed("[[sites]]", "[sites]"), r"sites: it must be tables \[\[sites\]\]"),
    "not TOML": ("nodes = [", "not valid TOML"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_line_with_its_place(case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(ConfigError, match=message) as caught:
        parse_cluster(text, "c.toml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("c.toml: ")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8 Mbit/s", 1e6),
        ("1.5Gbit/s", 187.5e6),
        ("12 MB/s", 12e6),
        ("80Mbps", 1e7),
        ("64 kbit/s", 8e3),
        ("9 bit/s", 1.125),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate("r", text) == pytest.approx(bytes_per_s)


def test_durations_and_speeds() -> None:
    assert [parse_duration("d", text) for text in ("20 ms", "1.5 s", "150us", "2 min")] == pytest.approx(
        [0.02, 1.5, 15e-5, 120]
    )
    assert [parse_flops("f", text) for text in ("10T", "500 GFLOPS", "2e12", "7 mflop/s")] == [1e13, 5e11, 2e12, 7e6]
    assert [format_flops(flops) for flops in (1.25e13, 3e9, 4e6, 12)] == [
        "12.5 TFLOPS",
        "3 GFLOPS",
        "4 MFLOPS",
        "12 FLOPS",
    ]
    for parse, text in ((parse_duration, "20"), (parse_flops, "-1T"), (parse_flops, "fast"), (parse_rate, "5 Mbit")):
        with pytest.raises(ConfigError):
            parse("x", text)
