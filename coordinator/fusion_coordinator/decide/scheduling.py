"""Which job may start now, and on which nodes."""

from __future__ import annotations

from collections import Counter

from fusion.base.ids import Epoch, Incarnation, JobId, NodeId
from fusion.links import LinkEstimate, LinkView
from fusion.plan.types import UNMEASURED_LINK, Cluster, ClusterNode, Link, LinkTable
from fusion_coordinator.liveness import Presence, Presences
from fusion_coordinator.state import State
from fusion_coordinator.state.records import JobRecord, JobState, NodeRecord, NodeState


def waiting(state: State) -> list[JobRecord]:
    """Return the jobs that want a plan: those that broke first, then those that pause, then the longest waiting."""
    order = {JobState.RECOVERING: 0, JobState.PAUSED: 1}
    return sorted(
        (job for job in state.jobs.values() if job.wants_plan),
        key=lambda job: (order.get(job.state, 2), job.submitted_wall_s),
    )


def needed_by(job: JobRecord) -> set[NodeId]:
    """Return the nodes that a job needs: those that work on it, and those that it moves to.

    One that has just broken needs those that it ran on, for their states, and to go on with.
    """
    if job.collects:
        return {stage.node for stage in job.stages}
    if not job.state.active:
        return set()
    moves_to = job.next.stages if job.next is not None else ()
    return {stage.node for stage in job.stages if not stage.state.ended} | {stage.node for stage in moves_to}


def working(state: State) -> set[NodeId]:
    """Return the nodes that an active job still needs."""
    return {node for job in state.jobs.values() for node in needed_by(job)}


def ready_for(state: State, presences: Presences, job: JobRecord) -> list[NodeRecord]:
    """Return the nodes that a waiting job can be given, by name; a worker of it that is still there is replaced."""
    taken = working(state)
    found = [
        node
        for node in state.nodes.values()
        if node.node not in taken and _here(state, node, presences.get(node.node), job.job)
    ]
    return sorted(found, key=lambda node: (node.name, node.node))


def idle(state: State, presences: Presences) -> list[NodeRecord]:
    """Return the nodes that can be given work, by name."""
    taken = working(state)
    found = [
        node
        for node in state.nodes.values()
        if node.node not in taken and _here(state, node, presences.get(node.node), "")
    ]
    return sorted(found, key=lambda node: (node.name, node.node))


def leaving(state: State, presences: Presences, ended_after_wall_s: float) -> list[NodeRecord]:
    """Return the nodes that still run a worker of a job that is over, and ended after that time."""
    return [
        node
        for node in state.nodes.values()
        if (presence := presences.get(node.node)) is not None
        and (job := state.jobs.get(JobId(presence.job))) is not None
        and job.state.ended
        and job.finished_wall_s > ended_after_wall_s
        and _here(state, node, presence, job.job)
    ]


def usable_by(state: State, presences: Presences, job: JobRecord) -> list[NodeRecord]:
    """Return the nodes that a running job could move to, by name: its own, and those that are idle."""
    mine = {(stage.node, stage.incarnation) for stage in job.stages if not stage.state.ended}
    own = [
        node
        for node in state.nodes.values()
        if (node.node, node.incarnation) in mine and _here(state, node, presences.get(node.node), job.job)
    ]
    return sorted([*own, *idle(state, presences)], key=lambda node: (node.name, node.node))


def _here(state: State, node: NodeRecord, presence: Presence | None, job: str) -> bool:
    """Whether a node is in contact and runs nothing, or by its own word this job."""
    return (
        node.state is NodeState.MEMBER
        and not node.draining
        and node.node not in state.revoked
        and presence is not None
        and presence.incarnation == node.incarnation
        and presence.watching
        and presence.job in ("", job)
    )


def same_torch(node_version: str, job_version: str) -> bool:
    """Whether a node's torch may run a job: major and minor version equal, or the job does not say."""
    return not job_version or _minor(node_version) == _minor(job_version)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+", maxsplit=1)[0].split(".")[:2])


def split_by_torch(nodes: list[NodeRecord], job_version: str) -> tuple[list[NodeRecord], list[str]]:
    """Return the nodes whose torch fits the job, and one remark for each of the others."""
    fit = [node for node in nodes if same_torch(node.hardware.torch_version, job_version)]
    remarks = [
        f"node {node.name} has torch {node.hardware.torch_version}, the job needs {'.'.join(_minor(job_version))}.x"
        for node in nodes
        if node not in fit
    ]
    return fit, remarks


def cluster_of(nodes: list[NodeRecord], links: LinkView | None = None) -> Cluster:
    """Return the nodes, and the links between them as far as they are known, as planners see them."""
    links = links or LinkView({})
    label = site_labels(nodes, links)
    found = tuple(
        ClusterNode(
            node.node,
            node.name,
            node.address,
            Incarnation(node.incarnation),
            node.hardware.memory_bytes,
            node.hardware.flops,
            site=label.get(links.site.get(node.node, ""), ""),
            bytes_per_s=node.hardware.bytes_per_s,
            efficiency=tuple(sorted(node.hardware.efficiency.items())),
        )
        for node in nodes
    )
    if links.default is None and not links.pairs:
        return Cluster(found)
    pairs = {(NodeId(one), NodeId(other)): _link(link) for (one, other), link in links.pairs.items()}
    sites = {(label[one], label[other]): _link(link) for (one, other), link in links.sites.items()}
    default = UNMEASURED_LINK if links.default is None else _link(links.default)
    return Cluster(found, LinkTable(pairs, sites, default))


def site_labels(nodes: list[NodeRecord], links: LinkView) -> dict[str, str]:
    """Return what people call each site, by its representative: that node's name, or its id where names are shared."""
    names = Counter(node.name for node in nodes)
    known = {node.node: node.name if names[node.name] == 1 else node.node for node in nodes}
    return {head: known.get(NodeId(head), head) for head in links.site.values()}


def _link(link: LinkEstimate | None) -> Link | None:
    return None if link is None else Link(link.rate_bytes_per_s, link.round_trip_s / 2)


def waits_for_nodes(state: State, remarks: list[str]) -> str:
    """Return why a job waits when no node can take it."""
    if remarks:
        return f"no idle node fits: {'; '.join(remarks)}"
    members = sum(node.state is NodeState.MEMBER for node in state.nodes.values())
    if not state.nodes:
        return "no node has joined yet; 'fusion-coordinator token create' makes a join string for one"
    if not members:
        return "no node is here, all have left or were lost; start one with 'fusion-node start'"
    return f"all {members} nodes are busy or out of contact"


def next_epoch(job: JobRecord) -> Epoch:
    """Return the number of the job's next plan."""
    return Epoch(job.epoch + 1)
