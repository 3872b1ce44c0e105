"""The search's model of a pipeline as a chain, and the dynamic program over the cuts of a given order of nodes.

Here all that crosses a cut travels on the one link across it. `cost.Problem.evaluate` is exact; this is the same for
chains and near it for graphs whose edges skip stages.

Everything here runs from the end of the graph to its front, because how many micro-batches a stage holds in memory
depends on how many stages come after it. Depth d is place K - d; [p, q] is a pair of stages of which q comes before p.
E[d] is the least fill of the stages that run the last d blocks, M[d] their bottleneck on that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from fusion.plan.codecs import Ladder, PlanCodec
from fusion.plan.cost import Arrangement, Problem

Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Order = tuple[int, ...]

_ABSENT_S_PER_BYTE = 1e6  #: a finite stand-in for links that do not exist: nothing times it is still nothing
NEVER = np.float32(1e12)  #: seconds; anything slower does not exist
_CAPS, _SLOW_CAPS = 64, 12
_ROUNDING = 1e-6


class Chain:
    """A problem in single precision, in which each link has the fastest codec of `ladder`.

    Memory is counted for `slope` more micro-batches in flight at each stage than at the next one, up to all of them.
    With `recompute` every stage may run forwards again to save memory, and time is counted as if all did.
    """

    def __init__(self, problem: Problem, ladder: Ladder, slope: float = 1.0, *, recompute: bool = False) -> None:
        self.problem, self.ladder, self.slope = problem, ladder, slope
        self.recompute = recompute or problem.job.recompute == "always"
        profile, network = problem.profile, problem.network
        self.waits = np.float32(problem.micro_batches - 1)
        self.nodes, self.blocks = len(network.flops), profile.blocks
        self._forwards = 2 if self.recompute else 1
        self.seconds = _reversed(problem.seconds_with(self._forwards)).astype(np.float32)  #: [node, depth]
        self.forward_out = profile.forward_out[::-1].astype(np.float32)
        self.backward_out = profile.backward_out[::-1].astype(np.float32)
        self._choose_codecs(network.s_per_byte)
        delay = np.minimum(network.delay_s, NEVER)
        self.delay = (delay + delay.T).astype(np.float32)
        self.caps_s = self._caps()
        self.limits_s = (self.caps_s * (1 + _ROUNDING)).astype(np.float32)
        self._memory: dict[int, Ints] = {}

    def _choose_codecs(self, s_per_byte: npt.NDArray[np.float64]) -> None:
        """Take for each way of each pair the fastest level; one whose ways go together, for both of them."""
        ladder = self.ladder
        there, back = (_raw_byte_s(codecs, s_per_byte) for codecs in (ladder.forward, ladder.backward))
        level_there, level_back = there[1].argmin(axis=0), back[1].argmin(axis=0)  # [source, target]
        joined = np.array(ladder.joined)
        together = joined[level_there] | joined[level_back].T
        both = np.maximum(level_there, level_back.T)
        self._level_there: Ints = np.where(together, both, level_there)  #: [source, target] of a value
        self._level_back: Ints = np.where(together.T, both.T, level_back)  #: [source, target] of a gradient
        self.there, codec_there = (_taken(part, self._level_there).T.copy() for part in (there[0], there[2]))
        self.back, codec_back = (_taken(part, self._level_back) for part in (back[0], back[2]))
        #: there: [p, q], seconds that a raw byte from q to p keeps the link busy; back: from p to q; codec: the rest
        self._codec_there_s, self._codec_back_s = codec_there, codec_back

    def arrange(self, nodes: Sequence[int], places: Sequence[int]) -> Arrangement:
        """Return nodes and places (front to end) with this chain's codecs."""
        if len(self.ladder) == 1:
            return Arrangement.alike(tuple(nodes), tuple(places), *self.ladder.both)
        order = np.array(nodes, dtype=np.int64)
        pairs = np.ix_(order, order)
        choice = np.triu(self._level_there[pairs]) + np.tril(self._level_back[pairs] + len(self.ladder), -1)
        return Arrangement(tuple(nodes), tuple(places), self.ladder.both, choice)

    # ---- how far a stage may reach ----

    def _caps(self) -> npt.NDArray[np.float64]:
        """Bottlenecks to try: from all nodes sharing the work without loss to the slowest doing all of it, and on to
        the slowest link, which may have to be used if no node can hold the whole model.
        """
        total = self.problem.seconds_with(self._forwards)[:, -1]
        low, high = float(1.0 / (1.0 / total).sum()), float(total.max()) * 1.05
        out = float((self.forward_out + self.backward_out).max())
        links = self.there[self.there < _ABSENT_S_PER_BYTE / 2]
        slowest = float(links.max(initial=0.0)) * out * 1.05
        if slowest <= high:
            return np.geomspace(low, high, _CAPS)
        beyond = np.geomspace(high, slowest, _SLOW_CAPS + 1)[1:]
        return np.concatenate([np.geomspace(low, high, _CAPS - _SLOW_CAPS), beyond])

    def cap_of(self, period_s: float) -> int:
        """Return the index of the smallest bottleneck in the grid that is not below `period_s`."""
        return min(_CAPS - 1, int(np.searchsorted(self.caps_s, period_s * (1 - _ROUNDING))))

    def caps_near(self, cap: int, steps: Sequence[int]) -> list[int]:
        """Return the caps so many steps beside one, within the grid."""
        return sorted({min(_CAPS - 1, max(0, cap + step)) for step in steps})

    def caps_everywhere(self, count: int) -> list[int]:
        """Return so many caps spread over the grid, with the largest one."""
        return [(_CAPS - 1) * step // count for step in range(1, count + 1)]

    @cached_property
    def windows(self) -> Ints:
        """[cap, node, d]: the least depth at which a stage may end that begins at depth d, for the bottleneck."""
        return np.array([self.window_at(float(cap_s)) for cap_s in self.caps_s])

    def window_at(self, cap_s: float) -> Ints:
        """Return the same for a bottleneck that need not be in the grid."""
        index, works = self.problem.paces
        first = np.empty((self.nodes, self.blocks + 1), dtype=np.int64)
        for kind, (forward, backward) in enumerate(works):
            of_kind = index == kind
            work = _reversed(self._forwards * forward + backward)
            reach = cap_s * (1 + _ROUNDING) * self.problem.network.flops[of_kind]
            first[of_kind] = np.searchsorted(work, work[None, :] - reach[:, None])
        return first

    def flights(self, behind: int) -> int:
        """Return the micro-batches in flight at a stage with so many stages behind it."""
        count = self.problem.micro_batches
        return count if self.problem.gpipe else min(count, 1 + ceil(behind * self.slope))

    @property
    def memory_binds(self) -> bool:
        """Whether some node is too small for a whole graph at the front of a long pipeline."""
        need = self._need(self.flights(self.problem.max_stages - 1))
        largest = np.diagonal(need, 1) if self.problem.whole_blocks else need
        return bool(largest.max() > self.problem.network.memory_bytes.min())

    def room(self, behind: int) -> Ints:
        """[node, d]: as `windows`, for the node's memory, at a stage with so many stages behind it."""
        flights = self.flights(behind)
        found = self._memory.get(flights)
        if found is None:
            found = self._memory[flights] = self._room(flights)
        return found

    def _room(self, flights: int) -> Ints:
        need = self._need(flights)[::-1, ::-1].T  # [end, begin] in depths
        limits, index = np.unique(self.problem.network.memory_bytes, return_inverse=True)
        depths = np.arange(self.blocks + 1)
        inside = depths[:, None] < depths[None, :]
        first = np.empty((len(limits), self.blocks + 1), dtype=np.int64)
        for row, limit in enumerate(limits):
            over = (need > limit) & inside
            first[row] = np.where(over.any(axis=0), self.blocks + 1 - np.argmax(over[::-1], axis=0), 0)
        if self.problem.whole_blocks:
            first = np.maximum(first, depths - 1)
        return first[index]

    def _need(self, flights: int) -> npt.NDArray[np.float64]:
        """[i, j]: bytes of a stage between two places."""
        profile = self.problem.profile
        plain = profile.memory_bytes(flights)
        return np.minimum(plain, profile.memory_bytes(flights, recompute=True)) if self.recompute else plain

    # ---- links ----

    def link_fill(self, after: Ints, before: Ints) -> Singles:
        """[.., d]: seconds that a cut at depth d adds to the fill, for pairs of nodes."""
        forward = (self.there[after, before] + self._codec_there_s[after, before])[..., None]
        backward = (self.back[after, before] + self._codec_back_s[after, before])[..., None]
        found: Singles = forward * self.forward_out + backward * self.backward_out
        found += self.delay[after, before][..., None]
        return found

    def link_busy(self, after: Ints, before: Ints) -> Singles:
        """[.., d]: seconds that a cut at depth d keeps the link busy per micro-batch."""
        forward = self.there[after, before][..., None] * self.forward_out
        backward = self.back[after, before][..., None] * self.backward_out
        if self.problem.gpipe:
            return np.asarray(forward + backward)
        return np.asarray(np.maximum(forward, backward))

    @cached_property
    def all_links(self) -> tuple[Singles, Singles]:
        """[p, d, q]: fill and busy seconds of all pairs."""
        pair = np.ix_(np.arange(self.nodes), np.arange(self.nodes))
        fill, busy = self.link_fill(*pair), self.link_busy(*pair)
        return fill.transpose(0, 2, 1).copy(), busy.transpose(0, 2, 1).copy()

    # ---- one order of nodes ----

    def last_stage(self, seconds: Singles, window: Ints) -> Singles:
        """Return E after the last stage, [.., d]."""
        possible = (window <= 0) & (np.arange(self.blocks + 1) > 0)
        return np.where(possible, seconds, NEVER)

    def best_cuts(self, order: Sequence[int], caps: Sequence[int]) -> Arrangement | None:
        """Return the best arrangement of exactly these nodes in this order by exact evaluation, if there is one."""
        best: tuple[float, Arrangement | None] = (np.inf, None)
        for places in self._cuts(np.array(order[::-1], dtype=np.int64), np.array(caps, dtype=np.int64)):
            found = self.arrange(order, places)
            step_s = self.problem.step_s(found)
            if step_s < best[0]:
                best = (step_s, found)
        return best[1]

    def _cuts(self, nodes: Ints, caps: Ints) -> list[Order]:
        limits = self.limits_s[caps][:, None]
        windows = [
            np.maximum(self.windows[caps, node], self.room(behind)[node]) for behind, node in enumerate(nodes)
        ]  # [cap, d] by stage
        fill = self.last_stage(self.seconds[nodes[0]], windows[0])
        origins = []
        for behind in range(1, len(nodes)):
            pair = nodes[behind - 1], nodes[behind]
            start = fill + np.where(self.link_busy(*pair) <= limits, self.link_fill(*pair), NEVER)
            value, origin = extend(start - self.seconds[nodes[behind]], windows[behind])
            fill = value + self.seconds[nodes[behind]]
            origins.append(origin)
        rows = [row for row in range(len(caps)) if fill[row, -1] < NEVER / 2]
        return list(dict.fromkeys(self.places([origin[row] for origin in origins]) for row in rows))

    def places(self, origins: Sequence[Ints]) -> Order:
        """Follow the origins, [d] by stage from the second last, from the front of the graph; return the places."""
        depth, found = self.blocks, [0]
        for origin in reversed(origins):
            depth = int(origin[depth])
            found.append(self.blocks - depth)
        return (*found, self.blocks)


def _raw_byte_s(codecs: Sequence[PlanCodec], s_per_byte: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
    """Return [codec, source, target] seconds per raw byte: that the link is busy, in all, and the rest of them."""
    ratio = np.array([codec.ratio for codec in codecs])[:, None, None]
    encode_s = np.array([codec.encode_s_per_byte for codec in codecs])[:, None, None]
    decode_s = np.array([codec.decode_s_per_byte for codec in codecs])[:, None, None]
    transfer = np.minimum(s_per_byte / ratio, _ABSENT_S_PER_BYTE)
    busy, whole = np.maximum(transfer + encode_s, decode_s), transfer + encode_s + decode_s
    return [busy, whole, whole - busy]


def _taken(by_level: npt.NDArray[np.float64], level: Ints) -> Singles:
    return np.asarray(np.take_along_axis(by_level, level[None], axis=0)[0], dtype=np.float32)


def _reversed(before: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Turn sums over all that lies before a place into sums over all that lies behind a depth."""
    return np.asarray(before[..., -1:] - before[..., ::-1])


def extend(start: Singles, window: Ints) -> tuple[Singles, Ints]:
    """Return for each d the least start[i] with window[d] <= i < d, and that i. Arrays are [.., d].

    By tables of the least among 1, 2, 4, ... neighbours: any range is covered by two of them. Value and place are one
    integer, so that one minimum finds both; of equal values the first is taken.
    """
    count = start.shape[-1]
    depths = np.arange(count)
    lengths = depths - window
    possible = lengths > 0
    levels = _LOG[np.where(possible, lengths, 1)]
    table = (_ordered(start) << _PLACE_BITS) | depths
    tables = [table]
    for level in range(int(levels.max())):
        step = 1 << level
        table = np.concatenate([np.minimum(table[..., :-step], table[..., step:]), table[..., -step:]], axis=-1)
        tables.append(table)
    flat = np.concatenate(tables, axis=None)
    row = (np.arange(start.size // count) * count).reshape(*start.shape[:-1], 1)
    base = levels * start.size + row
    left, right = base + np.minimum(window, count - 1), base + np.maximum(depths - (1 << levels), 0)
    best = np.minimum(flat[left], flat[right])
    return np.where(possible, _unordered(best >> _PLACE_BITS), NEVER), best & ((1 << _PLACE_BITS) - 1)


_PLACE_BITS = 12
_LOG = np.array([0, *(length.bit_length() - 1 for length in range(1, 1 << _PLACE_BITS))], dtype=np.int64)


def _ordered(values: Singles) -> Ints:
    """Return integers that are ordered as the numbers are: their bits, those of negative ones turned round."""
    bits = np.ascontiguousarray(values).view(np.int32).astype(np.int64)
    return np.asarray(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _unordered(integers: Ints) -> Singles:
    bits = integers ^ ((integers >> 31) & 0x7FFFFFFF)
    return bits.astype(np.int32).view(np.float32)
