"""The clusters of `benchmarks.prediction`: small enough for one machine, and as unlike each other as real ones."""

from __future__ import annotations

from fusion.plan.cluster_file import parse_cluster
from fusion.plan.types import Cluster

_TEXTS = {
    "uniform": """
[[nodes]]
name = "n"
speed = "0.8G"
memory = "1GiB"
count = 4
[default]
rate = "100 Mbit/s"
delay = "5 ms"
""",
    "speeds-10x": """
[[nodes]]
name = "best"
speed = "2G"
memory = "1GiB"
[[nodes]]
name = "good"
speed = "1G"
memory = "1GiB"
count = 2
[[nodes]]
name = "old"
speed = "0.4G"
memory = "1GiB"
[[nodes]]
name = "oldest"
speed = "0.2G"
memory = "1GiB"
[default]
rate = "100 Mbit/s"
delay = "10 ms"
""",
    "slow-links": """
[[nodes]]
name = "a"
speed = "1G"
memory = "1GiB"
[[nodes]]
name = "b"
speed = "0.8G"
memory = "1GiB"
[[nodes]]
name = "c"
speed = "1.2G"
memory = "1GiB"
[[nodes]]
name = "d"
speed = "1G"
memory = "1GiB"
[[links]]
between = ["a", "b"]
rate = "8 Mbit/s"
delay = "30 ms"
[[links]]
between = ["a", "c"]
rate = "20 Mbit/s"
rate_back = "12 Mbit/s"
delay = "10 ms"
[default]
rate = "12 Mbit/s"
delay = "20 ms"
""",
    "two-sites": """
[[nodes]]
name = "x"
speed = "0.6G"
memory = "1GiB"
site = "east"
count = 3
[[nodes]]
name = "y"
speed = "1.2G"
memory = "1GiB"
site = "west"
count = 3
[[sites]]
name = "east"
rate = "1 Gbit/s"
delay = "0.5 ms"
uplink = "20 Mbit/s"
[[sites]]
name = "west"
rate = "1 Gbit/s"
delay = "0.5 ms"
uplink = "40 Mbit/s"
[[links]]
between = ["east", "west"]
rate = "20 Mbit/s"
delay = "25 ms"
""",
    "far-apart": """
[[nodes]]
name = "p"
speed = "0.5G"
memory = "1GiB"
site = "paris"
count = 3
[[nodes]]
name = "q"
speed = "0.7G"
memory = "1GiB"
site = "quito"
count = 3
[[nodes]]
name = "r"
speed = "0.9G"
memory = "1GiB"
site = "rome"
count = 2
[[links]]
between = ["paris", "rome"]
rate = "50 Mbit/s"
delay = "15 ms"
[default]
rate = "16 Mbit/s"
delay = "50 ms"
""",
    "one-too-many": """
[[nodes]]
name = "n"
speed = "1G"
memory = "1GiB"
count = 4
site = "home"
[[nodes]]
name = "lone"
speed = "0.3G"
memory = "1GiB"
[[sites]]
name = "home"
rate = "200 Mbit/s"
delay = "2 ms"
[default]
rate = "8 Mbit/s"
delay = "50 ms"
""",
}


def clusters() -> dict[str, Cluster]:
    """Return the clusters by name."""
    return {name: parse_cluster(text, name) for name, text in _TEXTS.items()}
