"""Clusters for fault scenarios: shared where the scenario leaves the processes whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faultcluster import FaultCluster

SCENARIO_S = 420  #: leases have to end, workers to start again, and the machine may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give scenarios more time than other tests have."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_S))


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with FaultCluster(tmp_path_factory.mktemp("faults"), nodes=4) as made:
        yield made


@pytest.fixture
def cluster(four_nodes: FaultCluster) -> Iterator[FaultCluster]:
    """Four idle nodes on good links, whatever the scenario before has done; nothing is left over after the scenario."""
    four_nodes.heal()
    yield four_nodes
    four_nodes.check_nothing_is_left()


@pytest.fixture(scope="module")
def four_far_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with FaultCluster(tmp_path_factory.mktemp("far"), nodes=4, chaos=True) as made:
        yield made


@pytest.fixture
def far_cluster(four_far_nodes: FaultCluster) -> Iterator[FaultCluster]:
    """The same, with every connection over a link that can be made to fail."""
    four_far_nodes.heal()
    yield four_far_nodes
    four_far_nodes.check_nothing_is_left()
