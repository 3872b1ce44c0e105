"""A cluster as arrays: speed and memory by node, rate and delay by directed pair, and the uplinks of sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.plan.types import Cluster, Link, site_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Network:
    """Nodes are indices into `cluster.nodes`; [p, q] is the link from p to q."""

    cluster: Cluster
    flops: Floats
    memory_bytes: Floats
    s_per_byte: Floats  #: [p, q]; inf where p cannot connect to q
    delay_s: Floats  #: [p, q]; inf likewise
    site: Ints  #: index of each node's site
    out_s_per_byte: Floats  #: by site, of its uplink; 0 where nothing is shared
    in_s_per_byte: Floats

    @property
    def shares_uplinks(self) -> bool:
        """Whether any site has a shared uplink."""
        return bool(self.out_s_per_byte.any() or self.in_s_per_byte.any())

    def subset(self, nodes: Ints) -> Network:
        """Return the network of these nodes alone, in this order."""
        pick = np.ix_(nodes, nodes)
        chosen = Cluster(tuple(self.cluster.nodes[int(index)] for index in nodes), self.cluster.links)
        return Network(
            chosen,
            self.flops[nodes],
            self.memory_bytes[nodes],
            self.s_per_byte[pick],
            self.delay_s[pick],
            self.site[nodes],
            self.out_s_per_byte,
            self.in_s_per_byte,
        )


def network_of(cluster: Cluster) -> Network:
    """Return a cluster as arrays."""
    nodes, table = cluster.nodes, cluster.links
    names = {name: index for index, name in enumerate(dict.fromkeys(site_of(node) for node in nodes))}
    site = np.array([names[site_of(node)] for node in nodes], dtype=np.int64)
    s_per_byte, delay_s = _by_site(cluster, names, site)
    uplinks = [table.uplinks.get(name) for name in names]
    out = np.array([0.0 if uplink is None else 1.0 / uplink.out_bytes_per_s for uplink in uplinks])
    into = np.array([0.0 if uplink is None else 1.0 / uplink.in_bytes_per_s for uplink in uplinks])
    place = {node.node: index for index, node in enumerate(nodes)}
    for (source, target), link in table.pairs.items():
        if source in place and target in place:
            pair = place[source], place[target]
            s_per_byte[pair], delay_s[pair] = _figures(link)
    if table.uplinks:
        apart = site[:, None] != site[None, :]
        shared = np.maximum(out[site][:, None], into[site][None, :])
        s_per_byte = np.where(apart, np.maximum(s_per_byte, shared), s_per_byte)
    np.fill_diagonal(s_per_byte, np.inf)
    np.fill_diagonal(delay_s, np.inf)
    return Network(
        cluster,
        np.array([node.flops for node in nodes], dtype=np.float64),
        np.array([node.memory_bytes for node in nodes], dtype=np.float64),
        s_per_byte,
        delay_s,
        site,
        out,
        into,
    )


def _by_site(cluster: Cluster, names: dict[str, int], site: Ints) -> tuple[Floats, Floats]:
    rate_default, delay_default = _figures(cluster.links.default)
    count = len(names)
    s_per_byte, delay_s = np.full((count, count), rate_default), np.full((count, count), delay_default)
    for (source, target), link in cluster.links.sites.items():
        if source in names and target in names:
            pair = names[source], names[target]
            s_per_byte[pair], delay_s[pair] = _figures(link)
    pick = np.ix_(site, site)
    return s_per_byte[pick], delay_s[pick]


def _figures(link: Link | None) -> tuple[float, float]:
    return (np.inf, np.inf) if link is None else (1.0 / link.rate_bytes_per_s, link.delay_s)
