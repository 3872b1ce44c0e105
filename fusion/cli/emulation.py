"""A cluster file brought to life on this machine: daemons that stand for its nodes, links shaped like its links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusion.base.errors import ConfigError, StateError
from fusion.cli.democluster import DemoCluster, DemoNode
from fusion.cli.demoprediction import Prediction
from fusion.cli.demowan import DemoWan
from fusion.cli.helpers import Helpers
from fusion.job.job import Job
from fusion.job.prepare import captured_graph
from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.types import Cluster, Plan
from fusion.plan.workload import Workload, workload_of
from fusion.protocol.job import job_view
from fusion.protocol.jobstatus import JobStatus
from fusion.protocol.metrics import StepMetrics
from fusion.transport.frames import DEFAULT_WINDOW_BYTES

MOST_NODES = 16  #: daemons of one demo
_SIMULATED_STEPS = 3


class Emulation:
    """Coordinator, relay and daemons for the nodes of a cluster file. They run until `helpers` are stopped."""

    def __init__(self, helpers: Helpers, directory: Path, file: Cluster) -> None:
        """ConfigError for a file with more nodes than one machine should run."""
        check_size(file)
        self._helpers = helpers
        made = [DemoNode(node.name, node.flops, node.memory_bytes, emulated=True) for node in file.nodes]
        self.cluster = DemoCluster(helpers, directory, made)
        self.wan = DemoWan.of_cluster(self.cluster.nodes, file, directory)

    def start(self) -> None:
        """Start everything; `wait` returns when it is there."""
        self.cluster.start_coordinator()
        self.cluster.start_nodes(self.wan.start(self._helpers, self.cluster.environment))

    def wait(self) -> Cluster:
        """Return the cluster as the coordinator sees it, once all nodes are there and all links are measured."""
        self.cluster.wait_for_nodes()
        return self.cluster.wait_for_links()


def check_size(file: Cluster) -> None:
    """Raise ConfigError for a cluster that is too large to be emulated."""
    if len(file.nodes) > MOST_NODES:
        raise ConfigError(
            f"--cluster: the file has {len(file.nodes)} nodes; at most {MOST_NODES} are started on one machine, "
            "'fusion simulate' takes any number"
        )


class Load:
    """What a job asks of a cluster, captured once."""

    def __init__(self, job: Job) -> None:
        draft, self.graph = captured_graph(job)
        self.workload: Workload = workload_of(self.graph)
        self.view = job_view(draft)

    def simulated_s(self, plan: Plan, cluster: Cluster) -> float:
        """Return the step time that the simulator predicts."""
        return simulate_plan(
            plan,
            self.workload,
            cluster,
            steps=_SIMULATED_STEPS,
            optimizer_bytes_per_parameter=self.view.optimizer_bytes_per_parameter,
            window_bytes=DEFAULT_WINDOW_BYTES,
            record=False,
        ).step_s

    def prediction(self, status: JobStatus, cluster: Cluster, metrics: Sequence[StepMetrics]) -> Prediction:
        """Return what the plan of an ended job predicted on `cluster`, beside what was measured."""
        if status.plan is None:
            raise StateError(f"job {status.job_id} has no plan")
        return Prediction(status.plan, cluster, metrics, self.simulated_s(status.plan, cluster))
