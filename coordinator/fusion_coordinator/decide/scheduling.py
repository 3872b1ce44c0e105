"""Which job may start now, and on which nodes."""

from __future__ import annotations

from fusion.base.ids import Epoch, Incarnation, NodeId
from fusion.plan.types import Cluster, ClusterNode
from fusion_coordinator.liveness import Presence, Presences
from fusion_coordinator.state import State
from fusion_coordinator.state.records import JobRecord, JobState, NodeRecord, NodeState


def queued(state: State) -> list[JobRecord]:
    """Return the waiting jobs, the longest waiting first."""
    return [job for job in state.jobs.values() if job.state is JobState.QUEUED]


def working(state: State) -> set[NodeId]:
    """Return the nodes that an active job still needs."""
    return {
        stage.node for job in state.jobs.values() if job.state.active for stage in job.stages if not stage.state.ended
    }


def idle(state: State, presences: Presences) -> list[NodeRecord]:
    """Return the nodes that can be given work, by name."""
    taken = working(state)
    found = [
        node
        for node in state.nodes.values()
        if node.state is NodeState.MEMBER
        and node.node not in taken
        and node.node not in state.revoked
        and _free(node, presences.get(node.node))
    ]
    return sorted(found, key=lambda node: (node.name, node.node))


def _free(node: NodeRecord, presence: Presence | None) -> bool:
    return presence is not None and presence.incarnation == node.incarnation and presence.watching and not presence.job


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


def cluster_of(nodes: list[NodeRecord]) -> Cluster:
    """Return the nodes as planners see them."""
    return Cluster(
        tuple(
            ClusterNode(
                node.node,
                node.name,
                node.address,
                Incarnation(node.incarnation),
                node.hardware.memory_bytes,
                node.hardware.flops,
            )
            for node in nodes
        )
    )


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
