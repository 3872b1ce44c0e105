"""Whatever the graph and the cuts: the pieces compute what the whole computes, and the books balance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.graph.check import check_graph
from fusion.graph.dag import Graph, InputKind
from fusion.graph.operators import may_draw
from fusion.graph.partition import Partition, crossing_bytes, legal_cuts, operators_of, partition
from tests.support.random_graphs import buffers_of, graphs, run_in_pieces, run_whole, untimed


@st.composite
def cut_graphs(draw: st.DrawFn) -> Partition:
    graph = draw(graphs())
    legal = legal_cuts(graph)
    cuts = draw(st.sets(st.sampled_from(legal), max_size=5)) if legal else set()
    return partition(graph, sorted(cuts))


@untimed
@given(graphs())
def test_random_graphs_are_sound(graph: Graph) -> None:
    check_graph(graph)


@untimed
@given(cut_graphs())
def test_the_pieces_compute_what_the_whole_computes(found: Partition) -> None:
    graph = found.graph
    whole, pieces = run_whole(graph), run_in_pieces(found)
    loss = pieces[found.loss_stage].cells[graph.loss]
    assert loss.content == whole.cells[graph.loss].content
    for machine, shard in zip(pieces, found.shards, strict=True):
        own = [out for position in operators_of(shard) for out in graph.operators[position].outputs]
        assert machine.contents(own) == whole.contents(own)


@untimed
@given(cut_graphs())
def test_a_written_buffer_lives_in_one_stage_and_ends_as_in_the_whole(found: Partition) -> None:
    whole, pieces = run_whole(found.graph), run_in_pieces(found)
    for buffer in buffers_of(found.graph):
        name = found.graph.input_of[buffer].name
        if whole.cells[buffer].content != name:
            holders = [machine for machine in pieces if buffer in machine.cells]
            assert [machine.cells[buffer].content for machine in holders] == [whole.cells[buffer].content]


@untimed
@given(cut_graphs())
def test_random_operators_run_once_and_own_operators_cover_the_graph(found: Partition) -> None:
    own = [position for shard in found.shards for position in range(shard.first_operator, shard.end_operator)]
    assert own == list(range(len(found.graph.operators)))
    again = [position for shard in found.shards for position in shard.recomputed]
    assert not any(may_draw(found.graph.operators[position]) for position in again)


@untimed
@given(cut_graphs())
def test_edges_are_numbered_in_order_and_lead_to_later_stages_that_read_them(found: Partition) -> None:
    keys = [(edge.source, edge.value, edge.target) for edge in found.edges]
    assert keys == sorted(set(keys))
    assert [edge.edge for edge in found.edges] == list(range(len(keys)))
    for edge in found.edges:
        assert edge.source < edge.target
        assert found.stage_of_operator(found.graph.producer[edge.value]) == edge.source
        target = [found.graph.operators[position] for position in operators_of(found.shards[edge.target])]
        assert any(edge.value in op.reads() for op in target)


@untimed
@given(cut_graphs())
def test_every_use_of_a_trainable_parameter_is_counted_once(found: Partition) -> None:
    graph = found.graph
    parameters = [item.value for item in graph.inputs if item.kind is InputKind.PARAMETER]
    trainable = {value for value in parameters if graph.values[value].requires_grad}
    counted = {item.value: item for item in found.shared}
    for value in trainable:
        uses = {
            (position, occurrence, shard.index)
            for shard in found.shards
            for position in operators_of(shard)
            for occurrence, read in enumerate(graph.operators[position].reads())
            if read == value
        }
        holders = sorted({stage for _, _, stage in uses})
        assert holders == [shard.index for shard in found.shards if value in shard.inputs]
        if len(uses) > 1:
            shared = counted.pop(value)
            assert [(use.position, use.occurrence, use.stage) for use in shared.uses] == sorted(uses)
            assert list(shared.holders) == holders
    assert counted == {}


@untimed
@given(cut_graphs())
def test_crossing_bytes_bound_what_a_single_cut_sends(found: Partition) -> None:
    graph = found.graph
    bound = crossing_bytes(graph)
    for cut in legal_cuts(graph):
        sent = partition(graph, [cut]).edges
        assert sum(graph.values[edge.value].bytes for edge in sent) <= bound[cut]


@untimed
@given(cut_graphs())
def test_a_partition_is_a_pure_function_of_graph_and_cuts(found: Partition) -> None:
    cuts = [shard.first_operator for shard in found.shards[1:]]
    graph = found.graph
    fresh = Graph(graph.values, graph.inputs, graph.operators, graph.loss, graph.nominal_micro_batch)
    assert partition(fresh, cuts) == found
