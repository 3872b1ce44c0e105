"""What is wrong with a job is said when it is submitted, in one line, and nothing is kept of it."""

from __future__ import annotations

import grpc
import numpy
import pytest
from safetensors.numpy import save

from fusion.protocol.graph import graph_to_proto
from fusion.wire.v1 import coordinator_pb2, job_pb2
from tests.support.coordinator import CoordinatorProcess, FakeOwner
from tests.support.graphs import chain


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    with CoordinatorProcess(tmp_path_factory.mktemp("submission") / "state", {"jobs_per_owner": 3}) as process:
        yield process
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def owner(coordinator):
    owner = FakeOwner(coordinator)
    yield owner
    owner.close()


def weights(layers=4, **changes):
    tensors = {f"layers.{layer}.weight": numpy.zeros((4, 4), dtype=numpy.float32) for layer in range(layers)}
    return save({name: value for name, value in {**tensors, **changes}.items() if value is not None})


def spoil_graph(owner, spec):
    spec.graph.CopyFrom(owner.upload(b"\xff\xfe no graph"))


def unknown_operator(owner, spec):
    graph = graph_to_proto(chain(4))
    graph.operators[2].name = "aten.from_file.default"
    spec.graph.CopyFrom(owner.upload(graph.SerializeToString()))


def not_uploaded(owner, spec):
    spec.weights.digest = "ab" * 32


def wrong_size(owner, spec):
    spec.weights.size_bytes += 1


def path_as_digest(owner, spec):
    spec.weights.digest = "../../../etc/passwd"


def missing_tensor(owner, spec):
    spec.weights.CopyFrom(owner.upload(weights(**{"layers.2.weight": None})))


def wrong_shape(owner, spec):
    spec.weights.CopyFrom(owner.upload(weights(**{"layers.2.weight": numpy.zeros((4, 5), dtype=numpy.float32)})))


def wrong_dtype(owner, spec):
    spec.weights.CopyFrom(owner.upload(weights(**{"layers.2.weight": numpy.zeros((4, 4), dtype=numpy.float64)})))


def pickle_as_weights(owner, spec):
    spec.weights.CopyFrom(owner.upload(b"\x80\x02}q\x00(X\x01\x00\x00\x00a" * 20))


def truncated_weights(owner, spec):
    spec.weights.CopyFrom(owner.upload(weights()[:-4]))


def bad_cut(owner, spec):
    spec.cuts.extend([2, 99])


def too_many_cuts(owner, spec):
    spec.cuts.extend([1, 2])
    spec.max_stages = 2


def missing_field(owner, spec):
    spec.data.fields[0].name = "y"


def missing_rows(owner, spec):
    spec.data.samples = 9


def missing_data_tensor(owner, spec):
    spec.data.fields[0].rows.tensor = "z"


def no_file(owner, spec):
    spec.data.files[0].Clear()


def bad_setting(owner, spec):
    spec.steps = 0


def bad_name(owner, spec):
    spec.name = "<script>"


def window_too_long(owner, spec):
    tokens = save({"t": numpy.zeros(31, dtype=numpy.int64)})
    spec.data.files[0].blob.CopyFrom(owner.upload(tokens))
    spec.data.fields[0].window.CopyFrom(job_pb2.WindowSource(file=0, tensor="t", stride=4, offset=0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_graph, "graph"),
        (unknown_operator, "from_file"),
        (not_uploaded, "was not uploaded whole"),
        (wrong_size, "the job says"),
        (path_as_digest, "is not 64 characters"),
        (missing_tensor, "weights: layers.2.weight of the graph are not in the file"),
        (wrong_shape, r"weights: layers.2.weight is float32 \[4, 5\] in the file, float32 \[4, 4\] in the graph"),
        (wrong_dtype, "is float64"),
        (pickle_as_weights, "no safetensors file"),
        (truncated_weights, "the file is cut short"),
        (bad_cut, "cuts: 99"),
        (too_many_cuts, "max_stages=2"),
        (missing_field, "the model reads x, the data has y"),
        (missing_rows, "9 samples need 9 rows of 'x', which has 8"),
        (missing_data_tensor, "no tensor 'z'"),
        (no_file, "names neither a blob nor a path"),
        (bad_setting, "steps must be an integer"),
        (bad_name, "is not a usable name"),
        (window_too_long, "8 samples need 32 rows of 't', which has 31"),
    ],
)
def test_b_a_job_that_cannot_run_is_refused_with_its_reason(owner, spoil, message):
    spec = owner.job()
    spoil(owner, spec)
    with pytest.raises(grpc.RpcError, match=message) as caught:
        owner.submit(spec)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in caught.value.details()
    assert not owner.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=10).jobs


def test_weights_may_hold_more_than_the_graph_reads(owner):
    spec = owner.job()
    spec.weights.CopyFrom(owner.upload(weights(extra=numpy.zeros(3, dtype=numpy.float32))))
    owner.cancel(owner.submit(spec))


def test_t27_nobody_queues_without_end(owner):
    jobs = [owner.submit(owner.job()) for _ in range(3)]
    with pytest.raises(grpc.RpcError, match="you have 3 jobs queued or running, 3 are allowed"):
        owner.submit(owner.job())
    owner.cancel(jobs[0])
    jobs[0] = owner.submit(owner.job())
    for job in jobs:
        owner.cancel(job)
