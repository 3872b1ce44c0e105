"""A cluster as planners see it, to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Collection

from fusion.base.errors import WireError
from fusion.base.ids import Incarnation, NodeId
from fusion.plan.types import UNMEASURED_LINK, Cluster, ClusterNode, Link, LinkTable
from fusion.wire.v1 import coordinator_pb2


def cluster_to_proto(cluster: Cluster, idle: Collection[NodeId] = ()) -> coordinator_pb2.ClusterResponse:
    """Return the message for a cluster without shared uplinks; `idle` are the nodes that train nothing."""
    message = coordinator_pb2.ClusterResponse()
    for node in cluster.nodes:
        message.nodes.add(
            node_id=node.node,
            name=node.name,
            address=node.address,
            incarnation=node.incarnation,
            memory_bytes=node.memory_bytes,
            flops=node.flops,
            site=node.site,
            bytes_per_s=node.bytes_per_s,
            efficiency=dict(node.efficiency),
            idle=node.node in idle,
        )
    links = cluster.links
    message.links.extend(_link_to_proto(source, target, link) for (source, target), link in links.pairs.items())
    message.site_links.extend(_link_to_proto(source, target, link) for (source, target), link in links.sites.items())
    message.default_link.CopyFrom(_link_to_proto("", "", links.default))
    return message


def _link_to_proto(source: str, target: str, link: Link | None) -> coordinator_pb2.ClusterLink:
    rate, delay = (0.0, 0.0) if link is None else (link.rate_bytes_per_s, link.delay_s)
    return coordinator_pb2.ClusterLink(source=source, target=target, rate_bytes_per_s=rate, delay_s=delay)


def cluster_from_proto(message: coordinator_pb2.ClusterResponse, *, idle_only: bool = False) -> Cluster:
    """Return the cluster of a message, or its idle nodes alone; WireError for figures that cannot be."""
    nodes = tuple(_node_from_proto(node) for node in message.nodes if node.idle or not idle_only)
    default = _link_from_proto(message.default_link) if message.HasField("default_link") else UNMEASURED_LINK
    return Cluster(nodes, _table(message, default))


def _table(message: coordinator_pb2.ClusterResponse, default: Link | None) -> LinkTable:
    return LinkTable(
        {(NodeId(link.source), NodeId(link.target)): _link_from_proto(link) for link in message.links},
        {(link.source, link.target): _link_from_proto(link) for link in message.site_links},
        default,
    )


def _node_from_proto(node: coordinator_pb2.ClusterNode) -> ClusterNode:
    if not (math.isfinite(node.flops) and node.flops > 0 and node.memory_bytes > 0):
        raise WireError(f"cluster: node {node.name[:63]} has {node.flops:g} FLOPS and {node.memory_bytes} bytes")
    if not (math.isfinite(node.bytes_per_s) and node.bytes_per_s >= 0):
        raise WireError(f"cluster: node {node.name[:63]} moves {node.bytes_per_s:g} bytes/s")
    if not all(math.isfinite(share) and share > 0 for share in node.efficiency.values()):
        raise WireError(f"cluster: node {node.name[:63]} has an efficiency that is not above 0")
    return ClusterNode(
        NodeId(node.node_id),
        node.name,
        node.address,
        Incarnation(node.incarnation),
        node.memory_bytes,
        node.flops,
        node.site,
        node.bytes_per_s,
        tuple(sorted(node.efficiency.items())),
    )


def _link_from_proto(link: coordinator_pb2.ClusterLink) -> Link | None:
    rate, delay = link.rate_bytes_per_s, link.delay_s
    if not (math.isfinite(rate) and rate >= 0 and math.isfinite(delay) and delay >= 0):
        raise WireError(f"cluster: link {link.source[:63]} -> {link.target[:63]} has {rate:g} bytes/s and {delay:g} s")
    return Link(rate, delay) if rate else None
