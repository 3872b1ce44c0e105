"""Makes plans on a thread of its own, so that no heartbeat waits for one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from fusion.graph.dag import Graph
from fusion.plan import plan
from fusion.plan.types import Cluster, JobView, Plan
from fusion.protocol.job import BlobRef, JobSpec
from fusion_coordinator.admission import load_graph
from fusion_coordinator.blobs import BlobFiles

_GRAPHS_KEPT = 4


def job_view(spec: JobSpec) -> JobView:
    """Return what planners look at."""
    return JobView(
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        optimizer_bytes_per_parameter=spec.optimizer.state_bytes_per_parameter,
        max_stages=spec.max_stages,
        cuts=spec.cuts,
    )


class Planner:
    """Runs the planner, and keeps the last graphs that it read."""

    def __init__(self, files: BlobFiles) -> None:
        self._files = files
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._graphs: OrderedDict[str, Graph] = OrderedDict()

    async def plan(self, cluster: Cluster, spec: JobSpec) -> Plan:
        """Return a plan with epoch 1; PlanError if none fits, ConfigError if none ever could."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._plan, cluster, spec)

    def _plan(self, cluster: Cluster, spec: JobSpec) -> Plan:
        return plan(cluster, self._graph(spec.graph), job_view(spec))

    def _graph(self, blob: BlobRef) -> Graph:
        graph = self._graphs.pop(blob.digest, None)
        if graph is None:
            graph = load_graph(blob, self._files)
        self._graphs[blob.digest] = graph
        while len(self._graphs) > _GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return graph

    def close(self) -> None:
        """Forget everything; a plan under way is waited for by the thread alone."""
        self._executor.shutdown(wait=False, cancel_futures=True)
