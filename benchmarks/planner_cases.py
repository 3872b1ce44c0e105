"""Models and clusters for the planner's benchmark, made from layer shapes and random numbers, without torch.

Models are lists of operators with the floating-point operations, bytes and crossing values that capture would state
for them in fp32. The embedding and the head are two parameters, also where the published model ties them: a tied
weight on two stages sends its whole gradient every step (322 MB for GPT-2 XL), which would dwarf everything that
methods differ in. `gpt2_xl(tied=True)` keeps it tied.

Clusters are drawn per seed. "wild": speeds of 3 to 30 TFLOPS (log-uniform), 3-6 sites, 8 Mbit/s to 1 Gbit/s between
sites (log-uniform). "mild": 7 to 21 TFLOPS, 50 Mbit/s to 1 Gbit/s. Within a site: 1 to 10 Gbit/s. Every directed pair
deviates from its sites' rate by a log-normal factor of 20 %, within the range (up to 200 nodes).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fusion.base.ids import Incarnation, NodeId
from fusion.base.units import GIB
from fusion.plan.types import Cluster, ClusterNode, Link, LinkTable
from fusion.plan.workload import HeldLoad, OperatorLoad, ValueLoad, Workload

FLOAT_BYTES = 4
MBIT = 1e6 / 8
PAIRS_UP_TO = 200


@dataclass
class ModelBuilder:
    """Operators one after another; values are numbered by their maker."""

    operators: list[OperatorLoad] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    held: list[HeldLoad] = field(default_factory=list)

    def call(self, kind: str, reads: tuple[int, ...], elements: int, flops: float = 0.0, parameters: int = 0) -> int:
        """Add an operator that makes `elements` numbers; returns its position, which also names its result."""
        position = len(self.operators)
        for value in dict.fromkeys(reads):
            self.readers[value].append(position)
        if parameters:
            self.held.append(HeldLoad((position,), parameters * FLOAT_BYTES, parameters, trainable=True))
        moved = FLOAT_BYTES * (elements + parameters + sum(self.sizes[value] for value in reads))
        saved = 0 if kind == "view" else FLOAT_BYTES * elements
        self.operators.append(OperatorLoad(kind, flops, 2 * flops, moved, 2 * moved, saved))
        self.sizes.append(elements)
        self.readers.append([])
        return position

    def linear(self, x: int, tokens: int, inner: int, outer: int) -> int:
        """A matrix product with its own weight."""
        return self.call("linear", (x,), tokens * outer, 2.0 * tokens * inner * outer, inner * outer)

    def norm(self, x: int, tokens: int, width: int) -> int:
        """A normalisation."""
        return self.call("memory", (x,), tokens * width, 0.0, width)

    def attention(self, x: int, other: int, tokens: int, keys: int, width: int, inner: int) -> int:
        """Attention of `x` (tokens per micro-batch) over `other` with `keys` positions per sequence."""
        query = self.linear(x, tokens, width, inner)
        key = self.linear(other, tokens, width, inner)
        value = self.linear(other, tokens, width, inner)
        mixed = self.call("attention", (query, key, value), tokens * inner, 4.0 * tokens * keys * inner)
        return self.linear(mixed, tokens, inner, width)

    def add(self, left: int, right: int) -> int:
        """A residual."""
        return self.call("memory", (left, right), self.sizes[left])

    def feed_forward(self, x: int, tokens: int, width: int, inner: int, *, gated: bool = False) -> int:
        """Two matrix products with an activation between them; a gated one has three."""
        hidden = self.linear(x, tokens, width, inner)
        active = self.call("memory", (hidden,), tokens * inner)
        if gated:
            active = self.call("memory", (active, self.linear(x, tokens, width, inner)), tokens * inner)
        return self.linear(active, tokens, inner, width)

    def embedding(self, tokens: int, vocabulary: int, width: int) -> int:
        """Look tokens up."""
        position = self.call("rows", (), tokens * width)
        self.held.append(HeldLoad((position,), vocabulary * width * FLOAT_BYTES, vocabulary * width, trainable=True))
        return position

    def head(self, x: int, tokens: int, vocabulary: int, width: int) -> int:
        """Logits and the loss."""
        return self.call("memory", (self.linear(x, tokens, width, vocabulary),), 1)

    def workload(self) -> Workload:
        """Return what the planner takes; every position is a legal cut."""
        values = [
            ValueLoad(position, tuple(readers), size * FLOAT_BYTES, size * FLOAT_BYTES)
            for position, (readers, size) in enumerate(zip(self.readers, self.sizes, strict=True))
            if readers
        ]
        return Workload(self.operators, values, self.held, range(1, len(self.operators)))


def gpt2_xl(*, tied: bool = False) -> Workload:
    """GPT-2 XL (1.5 B): 48 layers of 1,600; micro-batches of 2 x 1,024 tokens."""
    build, width, length, tokens, vocabulary = ModelBuilder(), 1600, 1024, 2 * 1024, 50257
    x = build.embedding(tokens, vocabulary, width)
    for _ in range(48):
        normed = build.norm(x, tokens, width)
        x = build.add(x, build.attention(normed, normed, tokens, length, width, width))
        x = build.add(x, build.feed_forward(build.norm(x, tokens, width), tokens, width, 4 * width))
    last = build.head(build.norm(x, tokens, width), tokens, vocabulary, width)
    if tied:
        build.held = [item for item in build.held if item.elements != vocabulary * width]
        build.held.append(HeldLoad((0, last - 1), vocabulary * width * FLOAT_BYTES, vocabulary * width, trainable=True))
    return build.workload()


def llama_7b() -> Workload:
    """Llama-7B: 32 layers of 4,096, gated feed-forward of 11,008; micro-batches of 1,024 tokens."""
    build, width, tokens, vocabulary = ModelBuilder(), 4096, 1024, 32000
    x = build.embedding(tokens, vocabulary, width)
    for _ in range(32):
        normed = build.norm(x, tokens, width)
        x = build.add(x, build.attention(normed, normed, tokens, tokens, width, width))
        x = build.add(x, build.feed_forward(build.norm(x, tokens, width), tokens, width, 11008, gated=True))
    build.head(build.norm(x, tokens, width), tokens, vocabulary, width)
    return build.workload()


def t5_3b() -> Workload:
    """T5-3B: 24 + 24 layers of 1,024, 32 heads of 128, feed-forward of 16,384; micro-batches of 4 x 512 tokens.

    Every layer of the decoder reads the encoder's result: edges that skip stages.
    """
    build, width, inner, length, tokens, vocabulary = ModelBuilder(), 1024, 4096, 512, 4 * 512, 32128
    x = build.embedding(tokens, vocabulary, width)
    for _ in range(24):
        normed = build.norm(x, tokens, width)
        x = build.add(x, build.attention(normed, normed, tokens, length, width, inner))
        x = build.add(x, build.feed_forward(build.norm(x, tokens, width), tokens, width, 16384))
    encoded = build.norm(x, tokens, width)
    x = build.embedding(tokens, vocabulary, width)
    for _ in range(24):
        normed = build.norm(x, tokens, width)
        x = build.add(x, build.attention(normed, normed, tokens, length, width, inner))
        normed = build.norm(x, tokens, width)
        x = build.add(x, build.attention(normed, encoded, tokens, length, width, inner))
        x = build.add(x, build.feed_forward(build.norm(x, tokens, width), tokens, width, 16384))
    build.head(build.norm(x, tokens, width), tokens, vocabulary, width)
    return build.workload()


def small_chain(operators: int, seed: int) -> Workload:
    """A chain of uneven operators whose values all have their own size, for comparisons with the exact optimum."""
    draw, build = np.random.default_rng(seed), ModelBuilder()
    x = build.call("memory", (), 2_000_000)
    for _ in range(operators - 1):
        elements = int(draw.uniform(1e6, 4e6))
        x = build.call("linear", (x,), elements, float(draw.uniform(0.5e12, 2e12)), int(draw.uniform(1e6, 2e7)))
    return build.workload()


@dataclass(frozen=True)
class ClusterKind:
    """Ranges that a cluster is drawn from, log-uniform."""

    name: str
    flops: tuple[float, float]
    between_mbit: tuple[float, float]
    memory_gib: tuple[int, ...]


WILD = ClusterKind("wild", (3e12, 30e12), (8.0, 1000.0), (16, 24, 40, 80))
MILD = ClusterKind("mild", (7e12, 21e12), (50.0, 1000.0), (24, 40, 48))


def make_cluster(kind: ClusterKind, nodes: int, seed: int) -> Cluster:
    """Draw a cluster. Nodes come in random order."""
    draw = np.random.default_rng([seed, nodes])
    sites = int(draw.integers(3, 7))
    names = [f"site{index}" for index in range(sites)]
    home = draw.integers(0, sites, nodes)
    speeds = _log_uniform(draw, kind.flops, nodes)
    members = tuple(
        ClusterNode(
            NodeId(f"node{index:04d}"),
            f"n{index}",
            "",
            Incarnation(1),
            int(draw.choice(kind.memory_gib)) * GIB,
            float(speeds[index]),
            names[home[index]],
        )
        for index in range(nodes)
    )
    rates = _log_uniform(draw, kind.between_mbit, (sites, sites)) * MBIT
    delays = draw.uniform(0.01, 0.15, (sites, sites))
    delays = (delays + delays.T) / 2
    for site in range(sites):
        rates[site, site] = _log_uniform(draw, (1e3, 1e4), ()) * MBIT
        delays[site, site] = 0.0003
    table = {
        (names[a], names[b]): Link(float(rates[a, b]), float(delays[a, b])) for a in range(sites) for b in range(sites)
    }
    return Cluster(members, LinkTable(_pairs(draw, kind, members, home, table), table, default=None))


def _pairs(
    draw: np.random.Generator,
    kind: ClusterKind,
    members: tuple[ClusterNode, ...],
    home: np.ndarray,
    table: dict[tuple[str, str], Link],
) -> dict[tuple[NodeId, NodeId], Link | None]:
    if len(members) > PAIRS_UP_TO:
        return {}
    factors = np.exp(draw.normal(0.0, 0.2, (len(members), len(members))))
    found: dict[tuple[NodeId, NodeId], Link | None] = {}
    for a, source in enumerate(members):
        for b, target in enumerate(members):
            if a == b:
                continue
            link = table[source.site, target.site]
            low, high = (1e3, 1e4) if home[a] == home[b] else kind.between_mbit
            rate = min(max(link.rate_bytes_per_s * float(factors[a, b]), low * MBIT), high * MBIT)
            found[source.node, target.node] = Link(rate, link.delay_s)
    return found


def _log_uniform(draw: np.random.Generator, span: tuple[float, float], shape: int | tuple[int, ...]) -> np.ndarray:
    return np.exp(draw.uniform(np.log(span[0]), np.log(span[1]), shape))
