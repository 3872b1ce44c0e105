"""What an arrangement of stages on nodes costs: T = fill + (n - 1) x bottleneck, and the memory of every stage.

The fill is the time of one micro-batch through all stages and links and back. The bottleneck is what one micro-batch
keeps busy longest: a stage, one direction of a link, or a shared uplink. With "gpipe" the forwards of all
micro-batches come before the backwards, so each of the two has a bottleneck of its own and they add up. Delays fill
the pipeline but keep nothing busy. A link's own thread encodes a value and sends it, one after the other; another one
at its far end decodes. Both work beside the stages, so a link is busy for the longer of the two. Tied weights add the
exchange of their gradients, once a step.

A stage may keep only what came in of each micro-batch and run its forward again: then its backward takes the forward's
time more, and its memory holds the results of one micro-batch. That is chosen where memory would otherwise allow so
few micro-batches in flight, or none, that a step takes longer.

Every value is costed on the link between the stages that make and read it, also where it skips stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from fusion.plan.codecs import NONE, PlanCodec
from fusion.plan.need import MARGIN
from fusion.plan.network import Network
from fusion.plan.profile import Profile
from fusion.plan.types import JobView

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]

_ROUNDING = 1e-9
_TOLERANCE = 0.02  #: no micro-batch more is held in memory for so little of a period


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Which nodes run which blocks, in order, and which codec each directed pair of stages uses."""

    nodes: tuple[int, ...]
    places: tuple[int, ...]  #: one more than nodes; from 0 to the number of blocks
    ladder: tuple[PlanCodec, ...] = (NONE,)
    choice: Ints | None = None  #: [source, target] by stage, indices into the ladder; None: the first everywhere
    recompute: tuple[bool, ...] | None = None  #: by stage; None: as the job asks, "auto" where it makes a step shorter

    def codec(self, source: int, target: int) -> PlanCodec:
        """Return the codec from one stage to another."""
        return self.ladder[0 if self.choice is None else int(self.choice[source, target])]

    @staticmethod
    def alike(nodes: tuple[int, ...], places: tuple[int, ...], there: PlanCodec, back: PlanCodec) -> Arrangement:
        """Return an arrangement with one codec for all that goes forward, and one for all on the way back."""
        if there == back:
            return Arrangement(nodes, places, (there,))
        return Arrangement(nodes, places, (there, back), np.tri(len(nodes), k=-1, dtype=np.int64))

    @property
    def ways(self) -> tuple[PlanCodec, PlanCodec] | None:
        """The two codecs of an arrangement that is `alike`; None if links have codecs of their own."""
        there, back = self.ladder[0], self.ladder[-1]
        if len(self.ladder) == 1:
            return there, back
        other = Arrangement.alike(self.nodes, self.places, there, back)
        if self.choice is None or other.choice is None:
            same = self.choice is other.choice
        else:
            same = np.array_equal(self.choice, other.choice)
        return (there, back) if self.ladder == other.ladder and same else None

    def coded(self, raw_bytes: Floats) -> tuple[Floats, Floats, Floats]:
        """Return for bytes [source, target] those on the wire, and the seconds to encode and to decode them."""
        shape = (len(self.nodes), len(self.nodes))
        choice = np.zeros(shape, dtype=np.int64) if self.choice is None else self.choice
        ratio = np.array([codec.ratio for codec in self.ladder])
        encode = np.array([(codec.encode_s_per_byte, codec.encode_message_s) for codec in self.ladder])[choice]
        decode = np.array([(codec.decode_s_per_byte, codec.decode_message_s) for codec in self.ladder])[choice]
        messages = raw_bytes > 0
        return (
            raw_bytes / ratio[choice],
            raw_bytes * encode[..., 0] + messages * encode[..., 1],
            raw_bytes * decode[..., 0] + messages * decode[..., 1],
        )


@dataclass(frozen=True)
class Evaluation:
    """The cost of an arrangement. Matrices are [source, target] by stage."""

    step_s: float  #: inf where nodes cannot connect or memory does not suffice
    fill_s: float
    period_s: float  #: from one micro-batch to the next: the bottleneck, or longer where memory makes it wait
    busiest_s: float  #: the bottleneck
    tied_s: float
    forward_s: Floats
    backward_s: Floats
    raw_bytes: Floats  #: per micro-batch, before the codec
    link_s: Floats  #: encode, transfer, delay and decode; 0 where nothing is sent
    transfer_s: Floats  #: transfer alone
    tied_bytes: Floats  #: once a step
    in_flight: tuple[int, ...]
    memory_bytes: Floats
    missing_bytes: Floats  #: beyond the node's limit
    bottleneck: Pair  #: (stage, stage), the link (source, target), or (-1, site) of a shared uplink
    recompute: tuple[bool, ...]  #: stages that run forwards again; `backward_s` has that time
    short: tuple[bool, ...]  #: stages whose memory holds fewer micro-batches than would hide the links

    @property
    def waits(self) -> bool:
        """Whether memory allows too few micro-batches in flight to keep the bottleneck busy."""
        return self.period_s > self.busiest_s

    @property
    def fits(self) -> bool:
        """Whether every stage fits its node's memory and all that talk can connect."""
        return self.step_s < np.inf


def _quality(found: Evaluation) -> tuple[float, float, int]:
    return found.step_s, float(found.missing_bytes.sum()), sum(found.recompute)


class Problem:
    """A profile, a network and the job's settings. Stateless but for its caches."""

    def __init__(self, profile: Profile, network: Network, job: JobView) -> None:
        self.profile, self.network, self.job = profile, network, job
        self.micro_batches = job.micro_batches
        self.gpipe = job.schedule == "gpipe"
        self.max_stages = min(job.max_stages or len(network.flops), len(network.flops), profile.blocks)
        self.whole_blocks = bool(job.cuts)  #: the job's own cuts are all taken

    def subset(self, nodes: Ints) -> Problem:
        """Return the same problem on fewer nodes, which get new numbers in this order."""
        return Problem(self.profile, self.network.subset(nodes), self.job)

    @cached_property
    def paces(self) -> tuple[Ints, tuple[tuple[Floats, Floats], ...]]:
        """The index of each node's account of the work, and the accounts (forward, backward by place)."""
        model = self.profile.model
        kinds = [model.pace_of(node) for node in self.network.cluster.nodes]
        distinct = {pace: index for index, pace in enumerate(dict.fromkeys(kinds))}
        return (
            np.array([distinct[pace] for pace in kinds], dtype=np.int64),
            tuple(self.profile.work(pace) for pace in distinct),
        )

    @cached_property
    def seconds(self) -> Floats:
        """[node, place]: time of both passes over everything before the place."""
        return self.seconds_with(1)

    def seconds_with(self, forwards: int) -> Floats:
        """Return the same with so many forwards to a backward."""
        index, works = self.paces
        total = np.array([forwards * forward + backward for forward, backward in works])
        return np.asarray(total[index] / self.network.flops[:, None])

    @cached_property
    def is_chain(self) -> bool:
        """Whether the search's simpler model is exact: no skipping edges, tied weights or shared uplinks."""
        edges = self.profile.edges
        skips = bool((edges.target != edges.source + 1).any())
        tied = any(shared.trainable for shared in self.profile.shared)
        return not (skips or tied or self.network.shares_uplinks)

    def evaluate(self, arrangement: Arrangement) -> Evaluation:
        """Return what an arrangement costs."""
        return _Evaluator(self, arrangement).result()

    def step_s(self, arrangement: Arrangement) -> float:
        """Return the step time of an arrangement."""
        return self.evaluate(arrangement).step_s


class _Evaluator:
    """One evaluation, in the order in which the methods stand."""

    def __init__(self, problem: Problem, arrangement: Arrangement) -> None:
        self.problem, self.arrangement = problem, arrangement
        self.nodes = np.array(arrangement.nodes, dtype=np.int64)
        self.places = np.array(arrangement.places, dtype=np.int64)
        self.stages = len(self.nodes)
        pick = np.ix_(self.nodes, self.nodes)
        self.s_per_byte = problem.network.s_per_byte[pick]
        self.delay_s = problem.network.delay_s[pick]

    def result(self) -> Evaluation:
        self._compute()
        self._traffic()
        self._links()
        tied_s = self._tied()
        if self.arrangement.recompute is not None:
            return self._cost(np.array(self.arrangement.recompute), tied_s)
        if self.problem.job.recompute == "always":
            several = np.full(self.stages, self.problem.micro_batches > 1)
            several[-1] &= self.problem.gpipe  # otherwise it never holds more than one
            return self._cost(several, tied_s)
        found = self._cost(np.zeros(self.stages, dtype=bool), tied_s)
        if self.problem.job.recompute == "never" or not any(found.short):
            return found
        return min([found, *self._recomputing(found, tied_s)], key=_quality)

    def _recomputing(self, found: Evaluation, tied_s: float) -> Iterator[Evaluation]:
        """Yield the costs when all stages that are short of memory run forwards again, and without the busiest one."""
        short = np.array(found.short)
        again = self._cost(short, tied_s)
        yield again
        first, second = again.bottleneck
        if first == second and short[first] and short.sum() > 1:
            short = short.copy()
            short[first] = False
            yield self._cost(short, tied_s)

    def _cost(self, recompute: npt.NDArray[np.bool_], tied_s: float) -> Evaluation:
        self.recompute = recompute
        self.backward_s = self.once_s + recompute * self.forward_s
        fill_s = self._fill()
        busiest_s, bottleneck = self._bottleneck()
        in_flight, period_s, memory, missing = self._flights(busiest_s)
        step_s = fill_s + (self.problem.micro_batches - 1) * period_s + tied_s
        if missing.any() or not np.isfinite(fill_s) or not self._neighbours_connect():
            step_s = np.inf
        return Evaluation(
            float(step_s),
            fill_s,
            period_s,
            busiest_s,
            tied_s,
            self.forward_s,
            self.backward_s,
            self.raw,
            self.link_s,
            self.transfer_s,
            self.tied_bytes,
            in_flight,
            memory,
            missing,
            bottleneck,
            tuple(recompute.tolist()),
            tuple(self.short.tolist()),
        )

    def _compute(self) -> None:
        index, works = self.problem.paces
        flops = self.problem.network.flops[self.nodes]
        first, last = self.places[:-1], self.places[1:]
        kinds = index[self.nodes]
        forward = np.array([work[0] for work in works])
        backward = np.array([work[1] for work in works])
        self.forward_s = (forward[kinds, last] - forward[kinds, first]) / flops
        self.once_s = (backward[kinds, last] - backward[kinds, first]) / flops

    def _traffic(self) -> None:
        edges = self.problem.profile.edges
        source = np.searchsorted(self.places, edges.source, side="right") - 1
        target = np.searchsorted(self.places, edges.target, side="right") - 1
        first = np.ones(len(source), dtype=bool)  # a stage with several readers receives once
        first[1:] = (edges.group[1:] != edges.group[:-1]) | (target[1:] != target[:-1])
        sent = first & (target > source)
        source, target = source[sent], target[sent]
        self.raw = np.zeros((self.stages, self.stages))
        np.add.at(self.raw, (source, target), edges.forward_bytes[sent])
        np.add.at(self.raw, (target, source), edges.backward_bytes[sent])

    def _links(self) -> None:
        self.wire, encode, decode = self.arrangement.coded(self.raw)
        used = self.raw > 0
        self.transfer_s = np.where(used, self.wire * np.where(used, self.s_per_byte, 0.0), 0.0)
        self.link_s = np.where(used, self.transfer_s + self.delay_s + encode + decode, 0.0)
        self.link_busy_s = np.maximum(encode + self.transfer_s, decode)

    def _fill(self) -> float:
        """The longest way through all stages and back; in a chain, the sum of everything."""
        if not np.isfinite(self.link_s).all():
            return float("inf")
        if self._only_neighbours():
            return float(self.forward_s.sum() + self.backward_s.sum() + self.link_s.sum())
        way = np.where(self.raw > 0, self.link_s, -np.inf)  # only what is sent is waited for
        there, back = np.zeros(self.stages), np.zeros(self.stages)
        for stage in range(self.stages):
            begin = (there[:stage] + way[:stage, stage]).max(initial=0.0)
            there[stage] = begin + self.forward_s[stage]
        for stage in range(self.stages - 1, -1, -1):
            begin = (back[stage + 1 :] + way[stage + 1 :, stage]).max(initial=there[stage])
            back[stage] = begin + self.backward_s[stage]
        return float(back.max())

    def _neighbours_connect(self) -> bool:
        """Whether each stage reaches the next one and back: the norm and the verdict of a step go that way."""
        delays = np.concatenate([np.diagonal(self.delay_s, 1), np.diagonal(self.delay_s, -1)])
        return bool(np.isfinite(delays).all())

    def _only_neighbours(self) -> bool:
        return not (np.triu(self.raw, 2).any() or np.tril(self.raw, -2).any()) and bool(
            (np.diagonal(self.raw, 1) > 0).all()
        )

    def _bottleneck(self) -> tuple[float, Pair]:
        if self.problem.gpipe:
            upper = np.triu(self.link_busy_s)
            forward, _ = self._busiest(self.forward_s, upper, np.triu(self.wire))
            backward, _ = self._busiest(self.backward_s, self.link_busy_s - upper, np.tril(self.wire))
            both = self.link_busy_s + self.link_busy_s.T
            return forward + backward, self._busiest(self.forward_s + self.backward_s, both, self.wire)[1]
        return self._busiest(self.forward_s + self.backward_s, self.link_busy_s, self.wire)

    def _busiest(self, busy_s: Floats, link_s: Floats, wire: Floats) -> tuple[float, Pair]:
        stage = int(busy_s.argmax())
        longest, found = float(busy_s[stage]), (stage, stage)
        link = int(link_s.argmax())
        if link_s.flat[link] > longest:
            longest, found = float(link_s.flat[link]), (link // self.stages, link % self.stages)
        for site, seconds in self._uplinks(wire):
            if seconds > longest * (1 + _ROUNDING):
                longest, found = seconds, (-1, site)
        return longest, found

    def _uplinks(self, wire: Floats) -> list[tuple[int, float]]:
        network = self.problem.network
        if not network.shares_uplinks:
            return []
        site = network.site[self.nodes]
        leaving = wire * (site[:, None] != site[None, :])
        found = []
        for one in dict.fromkeys(site.tolist()):
            here = site == one
            out = float(leaving[here].sum() * network.out_s_per_byte[one])
            into = float(leaving[:, here].sum() * network.in_s_per_byte[one])
            found.append((one, max(out, into)))
        return found

    def _flights(self, period_s: float) -> tuple[tuple[int, ...], float, Floats, Floats]:
        """Return micro-batches in flight by stage, the period that they allow, memory, and what is missing of it.

        1F1B keeps one micro-batch more at each stage than at the next; where a link takes long, as many more as hide
        it. Memory may allow fewer: then the pipeline waits.
        """
        profile, count = self.problem.profile, self.problem.micro_batches
        first, last = self.places[:-1], self.places[1:]
        fixed = profile.resident_bytes[first, last] + 2 * profile.working_bytes[first, last]
        each, came_in = profile.flight_bytes[first, last], profile.input_bytes[first, last]
        fixed = fixed + np.where(self.recompute, each - came_in, 0.0)
        each = np.where(self.recompute, came_in, each)
        limit = self.problem.network.memory_bytes[self.nodes]
        pairs = self._pair_times()
        flights = [count] * self.stages if self.problem.gpipe else self._wanted(pairs, period_s)
        memory = MARGIN * (fixed + np.array(flights) * each)
        self.short = memory > limit
        if self.problem.gpipe or (memory <= limit).all():
            return tuple(flights), period_s, memory, np.maximum(memory - limit, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(each > 0, np.floor((limit / MARGIN - fixed) / each), count)
        fewer = [max(1, min(want, int(most))) for want, most in zip(flights, np.clip(room, 0, count), strict=True)]
        for stage in range(1, self.stages):
            fewer[stage] = min(fewer[stage], fewer[stage - 1])
        memory = MARGIN * (fixed + np.array(fewer) * each)
        period_s = max(period_s, self._waiting(pairs, fewer))
        return tuple(fewer), period_s, memory, np.maximum(memory - limit, 0.0)

    def _pair_times(self) -> list[float]:
        """Time of a micro-batch at each stage and the next one with the links between them, both ways."""
        busy = self.forward_s + self.backward_s
        between = np.diagonal(self.link_s, 1) + np.diagonal(self.link_s, -1)
        return [float(pair) for pair in busy[:-1] + busy[1:] + between]

    def _wanted(self, pairs: list[float], period_s: float) -> list[int]:
        wanted = [1]
        for pair in reversed(pairs):
            more = ceil(pair / period_s - _TOLERANCE) - 1 if 0 < period_s < np.inf and pair < np.inf else 1
            wanted.append(min(self.problem.micro_batches, wanted[-1] + max(1, more)))
        return wanted[::-1]

    def _waiting(self, pairs: list[float], flights: list[int]) -> float:
        """Return the period below which fewer micro-batches in flight do not let the pipeline go.

        A micro-batch that enters a stage frees its place when its backward is done; and neighbours that both are full
        take turns.
        """
        busy = (self.forward_s + self.backward_s).tolist()
        longest, round_trip = busy[-1] / flights[-1], busy[-1]
        for stage in range(self.stages - 2, -1, -1):
            round_trip += pairs[stage] - busy[stage + 1]
            if flights[stage] < self.problem.micro_batches:
                turns = flights[stage] - flights[stage + 1] + 1
                longest = max(longest, pairs[stage] / turns, round_trip / flights[stage])
        return float(longest)

    def _tied(self) -> float:
        """Every use's gradient of a tied weight goes to all other stages that hold it, after the last backward."""
        self.tied_bytes = np.zeros((self.stages, self.stages))
        for shared in self.problem.profile.shared:
            if not shared.trainable:
                continue
            uses = np.diff(shared.uses[self.places])
            holders = np.flatnonzero(uses)
            for source in holders:
                for target in holders[holders != source]:
                    self.tied_bytes[source, target] += uses[source] * shared.bytes
        used = self.tied_bytes > 0
        if not used.any():
            return 0.0
        exchange_s: list[float] = (self.tied_bytes[used] * self.s_per_byte[used] + self.delay_s[used]).tolist()
        return max(exchange_s)
