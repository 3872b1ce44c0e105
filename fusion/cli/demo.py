"""`fusion demo`: a coordinator and several nodes as real processes here, the links between them like a WAN's."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusion.base.errors import FusionError, UsageError
from fusion.cli.output import json_option, print_json

if TYPE_CHECKING:
    from fusion.cli.demoreport import Display, Outcome
    from fusion.cli.helpers import Helpers
    from fusion.job.job import Job
    from fusion.job.run import Run
    from fusion.plan.types import Cluster
    from fusion.protocol.metrics import StepMetrics

DEFAULT_STEPS = {"gpt": 40, "resnet": 60, "gpt-mini": 40}
_EMULATED_STEPS = 8
_PLANNERS = ("fusion", "op-fence", "equal-number", "equal-compute", "exact")
TERMINATED = 143


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks for."""

    nodes: int
    steps: int
    model: str
    wan: bool
    cluster: Cluster | None = None  #: to be emulated, instead of `nodes` and `wan`
    planner: str = "equal-compute"


@click.command()
@click.option("--nodes", type=click.IntRange(1, 16), help="Node daemons to start.  [default: 4]")
@click.option(
    "--steps", type=click.IntRange(1, 100_000), help="Optimizer steps; default: 40, 60 (resnet), 8 (--cluster)."
)
@click.option("--model", type=click.Choice(list(DEFAULT_STEPS)), help="Default: gpt; gpt-mini with --cluster.")
@click.option("--wan/--no-wan", default=None, help="Shape the links like a WAN's between three places (default).")
@click.option(
    "--cluster", "file", type=click.Path(path_type=Path), help="TOML file of nodes and links to emulate instead."
)
@click.option("--planner", type=click.Choice(_PLANNERS), help="With --cluster: who plans.  [default: fusion]")
@click.option("--keep", is_flag=True, help="Keep the directory with the logs.")
@json_option
def demo(
    nodes: int | None,
    steps: int | None,
    model: str | None,
    wan: bool | None,
    file: Path | None,
    planner: str | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Train a model over an emulated WAN on this machine, and compare with the same job in one process.

    A coordinator and the nodes run as processes of their own, with mutual TLS, on loopback. They end with the demo,
    however it ends. With --cluster the nodes stand for those of a cluster file (docs/planning.md), and the time that
    the plan predicts is compared with what the steps take.
    """
    wishes = _wishes(nodes, steps, model, wan, file, planner)
    with _terminable(), _directory(keep) as directory:
        outcome = _run(wishes, directory)
    if as_json:
        print_json(outcome.as_json())
    else:
        for line in outcome.lines():
            click.echo(line)


def _wishes(
    nodes: int | None, steps: int | None, model: str | None, wan: bool | None, file: Path | None, planner: str | None
) -> Wishes:
    """Return what was asked for; UsageError for options that do not go together, ConfigError for a bad cluster file."""
    if file is None:
        if planner is not None:
            raise UsageError("--planner goes with --cluster")
        model = model or "gpt"
        return Wishes(nodes or 4, steps or DEFAULT_STEPS[model], model, wan is not False)
    if nodes is not None or wan is not None:
        raise UsageError("--cluster says which nodes and links there are; leave --nodes and --wan out")
    from fusion.cli.emulation import check_size
    from fusion.cli.planning import read_cluster

    cluster = read_cluster(file)
    check_size(cluster)
    return Wishes(len(cluster.nodes), steps or _EMULATED_STEPS, model or "gpt-mini", True, cluster, planner or "fusion")


@contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    """A directory for logs and state, removed at the end unless `keep` or something failed that the logs explain."""
    directory = Path(tempfile.mkdtemp(prefix="fusion-demo-"))
    try:
        yield directory
    except FusionError:
        keep = True
        raise
    finally:
        if keep:
            click.echo(f"logs and state are in {directory}", err=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that everything is cleaned up."""

    def leave(_number: int, _frame: Any) -> None:
        raise SystemExit(TERMINATED)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(wishes: Wishes, directory: Path) -> Outcome:
    from fusion.cli.demoreport import Display
    from fusion.cli.helpers import Helpers

    with Display(wishes.steps) as display, Helpers(directory / "logs") as helpers:
        if wishes.cluster is not None:
            return _run_emulated(wishes, wishes.cluster, directory, display, helpers)
        return _run_here(wishes, directory, display, helpers)


def _run_here(wishes: Wishes, directory: Path, display: Display, helpers: Helpers) -> Outcome:
    """Train on equal nodes, and in one process meanwhile."""
    from fusion.cli.democluster import DemoCluster
    from fusion.cli.demoreport import Outcome, count_of
    from fusion.cli.demowan import DemoWan

    start_s, nodes = time.monotonic(), count_of(wishes.nodes, "node")
    display.say(f"starting a coordinator and {nodes}")
    cluster = DemoCluster(helpers, directory, wishes.nodes)
    wan = DemoWan.of_places(cluster.nodes, directory) if wishes.wan and wishes.nodes > 1 else None
    if wan is not None:
        display.say(wan.summary)
    cluster.start_coordinator()
    cluster.start_nodes({} if wan is None else wan.start(helpers, cluster.environment))
    job = _make_job(wishes)  # takes as long as the nodes take to come up
    cluster.wait_for_nodes()
    display.say(f"capturing and submitting {job.name}")
    with job.submit(cluster.address, cluster.credentials) as run:
        metrics, reference = _train(job, run, display, helpers, nodes)
        stages = run.status().stages
    links = {} if wan is None else wan.links
    return Outcome(wishes.model, metrics, reference, stages, links, time.monotonic() - start_s)


def _run_emulated(wishes: Wishes, file: Cluster, directory: Path, display: Display, helpers: Helpers) -> Outcome:
    """Train on nodes that stand for those of a cluster file; one process takes its turn when they are done.

    So it takes no time from them, and what the steps take is what the emulated cluster takes.
    """
    from fusion.cli.demoreport import Outcome, count_of
    from fusion.cli.emulation import Emulation, Load

    start_s, nodes = time.monotonic(), count_of(wishes.nodes, "node")
    display.say(f"starting a coordinator and {nodes}")
    emulation = Emulation(helpers, directory, file)
    display.say(emulation.wan.summary)
    emulation.start()
    job = _make_job(wishes)
    load = Load(job)
    display.say("measuring the links")
    cluster = emulation.wait()
    display.say(f"submitting {job.name}")
    with job.submit(emulation.cluster.address, emulation.cluster.credentials) as run:
        follower = _Follower(run, lambda step: display.step(nodes, step))
        display.begin(nodes)
        while not follower.join_for(0.5):
            helpers.check()
        metrics, status = follower.result(), run.status()
    helpers.stop()
    display.begin("one process")
    reference = job.run_local(lambda step: display.step("one process", step)).metrics
    prediction = load.prediction(status, cluster, metrics)
    seconds = time.monotonic() - start_s
    return Outcome(wishes.model, metrics, reference, status.stages, emulation.wan.links, seconds, prediction)


def _make_job(wishes: Wishes) -> Job:
    from fusion.cli.models import gpt_job, mini_gpt_job, resnet_job

    make = {"gpt": gpt_job, "resnet": resnet_job, "gpt-mini": mini_gpt_job}[wishes.model]
    stages = wishes.nodes if wishes.cluster is None else 0
    return make(wishes.steps, determinism="strict", threads=1, stages=stages, planner=wishes.planner, replan=False)


def _train(
    job: Job, run: Run, display: Display, helpers: Any, name: str
) -> tuple[list[StepMetrics], list[StepMetrics]]:
    """Follow the run in a thread and compute the reference meanwhile: most of the time the nodes wait for the WAN."""
    display.begin(name)
    follower = _Follower(run, lambda step: display.step(name, step))

    def reference_step(step: StepMetrics) -> None:
        follower.check()
        helpers.check()
        display.step("one process", step)

    reference = job.run_local(reference_step).metrics
    while not follower.join_for(0.5):
        helpers.check()
    return follower.result(), reference


class _Follower(threading.Thread):
    """Collects a run's metrics; its error is raised where it is asked."""

    def __init__(self, run: Run, on_step: Any) -> None:
        super().__init__(name="demo-follower", daemon=True)
        self._followed, self._on_step = run, on_step
        self._metrics: list[StepMetrics] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for step in self._followed.metrics():
                self._metrics.append(step)
                self._on_step(step)
        except BaseException as error:  # noqa: BLE001 - raised by `check` in the thread that waits
            self._error = error

    def check(self) -> None:
        """Raise what has ended the run, if anything did."""
        if self._error is not None:
            raise self._error

    def join_for(self, seconds: float) -> bool:
        """Wait for the run's end for a while; return whether it has come."""
        self.join(seconds)
        return not self.is_alive()

    def result(self) -> list[StepMetrics]:
        """Return the metrics of the run, which has ended."""
        self.check()
        return self._metrics
