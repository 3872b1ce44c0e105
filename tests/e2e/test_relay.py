"""Nodes of which one cannot dial the other train all the same, and no stranger gets through the relay."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from click.testing import CliRunner

from fusion.cli.linkview import link_lines, links_as_json
from fusion.cli.main import cli
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.channels import open_channel
from fusion.wire.v1 import relay_pb2, relay_pb2_grpc
from tests.e2e.test_training import curve, gpt
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("hidden"), 2, hidden=("node-0", "node-1"), relays=True) as made:
        yield made


def said_by(cluster: Cluster, *arguments: str) -> str:
    environment = {"FUSION_CREDENTIALS": str(cluster.credentials)}
    result = CliRunner(env=environment).invoke(cli, [*arguments, "--coordinator", cluster.address])
    assert result.exit_code == 0, result.output
    return result.output


def test_nodes_that_nobody_can_dial_say_so_and_train_through_the_relay_with_the_losses_of_one_process(hidden):
    seen = hidden.wait_for_links()
    for pair, link in seen.links.pairs.items():
        assert link is not None, f"{pair} has no link"
        assert 0 < link.rate_bytes_per_s < 20e6  # 100 Mbit/s and the burst of a short probe
    for name in hidden.nodes:
        said = hidden.log(name)
        assert "other nodes cannot reach this one" in said
        assert "reach it through the coordinator, at most 100 Mbit/s for all together" in said

    job = gpt(steps=10)
    with hidden.submit(job) as run:
        metrics = []
        for step in run.metrics():
            metrics.append(step)
            if step.step == 2:
                status = run.status()
                shown = said_by(hidden, "status", run.job_id)
    assert curve(metrics) == curve(job.run_local().metrics)
    assert len(status.stages) == 2
    assert {(link.source, link.target, link.by) for link in status.relayed} == {
        (0, 1, "coordinator"),
        (1, 0, "coordinator"),
    }
    assert all(link.bytes > 10_000 for link in status.relayed)
    assert "through the coordinator's relay" in shown
    links = links_as_json(status)
    assert links is not None
    assert [link["relayed_by"] for link in links["links"]] == ["coordinator"] * len(links["links"])
    assert link_lines(status)[1].endswith("coordinator")


def test_no_stranger_gets_through_the_relay(hidden):
    """A node of the cluster that has no job with the other, and an owner, who is no node."""
    node, other = (Credentials.load(hidden.directory / name) for name in ("node-0", "node-1"))
    hidden.wait_for_links()  # nobody measures any more
    for credentials, words in ((node, "only nodes of one job"), (Credentials.load(hidden.credentials), "may not call")):
        name = coordinator_server_name(credentials.cluster)
        with open_channel(hidden.address, credentials, name) as channel:
            stub = relay_pb2_grpc.RelayStub(channel)
            with pytest.raises(grpc.RpcError, match=words):
                list(stub.Connect(iter([relay_pb2.RelayFrame(target=other.identity)]), timeout=20))
            with pytest.raises(grpc.RpcError, match=r"waits for this node|may not call"):
                list(stub.Accept(iter([relay_pb2.RelayFrame(connection="relay-abc")]), timeout=20))


def test_where_one_end_can_dial_no_relay_is_needed_and_losses_are_those_of_one_process(tmp_path):
    with Cluster(tmp_path / "one-way", 2, hidden=("node-1",)) as cluster:
        seen = cluster.wait_for_links()
        assert all(seen.links.pairs.values())
        assert "other nodes cannot reach this one" in cluster.log("node-1")
        assert "as the coordinator relays nothing" in cluster.log("node-1")
        job = gpt(steps=4)
        with cluster.submit(job) as run:
            metrics = list(run.metrics())
            assert len(run.status().stages) == 2
        assert curve(metrics) == curve(job.run_local().metrics)
