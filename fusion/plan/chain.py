"""The search's model of a pipeline as a chain, and the dynamic programs over the cuts of a given order of nodes.

Here all that crosses a cut travels on the one link across it. `cost.Problem.evaluate` is
exact; this is the same for chains and near it for graphs whose edges skip stages.

Arrays are [.., place]. E[j] is the least fill of a pipeline that ends at place j, M[j] the bottleneck on that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from fusion.plan.codecs import PlanCodec
from fusion.plan.cost import Arrangement, Problem

Singles = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_ABSENT_S_PER_BYTE = 1e9  #: a finite stand-in for links that do not exist: nothing times it is still nothing
NEVER = np.float32(1e12)  #: seconds; anything slower does not exist
_CAPS = 64
_ROUNDING = 1e-6


class Chain:
    """A problem in single precision; each link has the fastest codec of `ladder`, and memory is counted for `flights`
    micro-batches in flight.
    """

    def __init__(self, problem: Problem, ladder: Sequence[PlanCodec], flights: int = 1) -> None:
        self.problem, self.ladder, self.flights = problem, tuple(ladder), flights
        profile, network = problem.profile, problem.network
        self.waits = np.float32(problem.micro_batches - 1)
        self.nodes, self.blocks = len(network.flops), profile.blocks
        self.seconds = problem.seconds.astype(np.float32)  #: [node, place]
        self.forward_out = profile.forward_out.astype(np.float32)
        self.backward_out = profile.backward_out.astype(np.float32)
        self._choose_codecs(network.s_per_byte)
        delay = np.minimum(network.delay_s, NEVER)
        self.delay = (delay + delay.T if profile.backward_out.any() else delay).astype(np.float32)
        self.caps_s = self._caps()
        self._least_place = self._memory_places()
        self._windows: dict[int, Ints] = {}
        self.limits_s = (self.caps_s * (1 + _ROUNDING)).astype(np.float32)

    def _choose_codecs(self, s_per_byte: npt.NDArray[np.float64]) -> None:
        ratio = np.array([codec.ratio for codec in self.ladder])[:, None, None]
        codec_s = np.array([codec.encode_s_per_byte + codec.decode_s_per_byte for codec in self.ladder])
        transfer = np.minimum(s_per_byte / ratio, _ABSENT_S_PER_BYTE)
        self.choice: Ints = (transfer + codec_s[:, None, None]).argmin(axis=0)  #: [p, q], index into the ladder
        chosen = np.take_along_axis(transfer, self.choice[None], axis=0)[0]
        self.transfer = chosen.astype(np.float32)  #: [p, q], seconds per raw byte from p to q
        self.back = self.transfer.T.copy()  #: from q to p
        self.codec_s = codec_s[self.choice].astype(np.float32)  #: [p, q], to encode and decode a raw byte
        self.codec_back_s = self.codec_s.T.copy()

    def arrange(self, nodes: Sequence[int], places: Sequence[int]) -> Arrangement:
        """Return nodes and places with this chain's codecs."""
        order = np.array(nodes, dtype=np.int64)
        choice = None if len(self.ladder) == 1 else self.choice[np.ix_(order, order)]
        return Arrangement(tuple(nodes), tuple(places), self.ladder, choice)

    def _caps(self) -> npt.NDArray[np.float64]:
        """Bottlenecks to try, from all nodes sharing the work without loss to the slowest doing all of it."""
        total = self.problem.seconds[:, -1]
        return np.geomspace(1.0 / (1.0 / total).sum(), total.max() * 1.05, _CAPS)

    def _memory_places(self) -> Ints:
        """[node, j]: the first place from which a stage that ends at j fits the node's memory."""
        need = self.problem.profile.memory_bytes(self.flights)
        limits, index = np.unique(self.problem.network.memory_bytes, return_inverse=True)
        places = np.arange(self.blocks + 1)
        first = np.zeros((len(limits), self.blocks + 1), dtype=np.int64)
        for row, limit in enumerate(limits):
            over = (need > limit) & (places[:, None] < places[None, :])
            first[row] = np.where(over.any(axis=0), self.blocks + 1 - np.argmax(over[::-1], axis=0), 0)
        if self.problem.whole_blocks:
            first = np.maximum(first, places - 1)
        return first[index]

    def window(self, cap: int) -> Ints:
        """[node, j]: the first place from which a stage that ends at j keeps below bottleneck `cap`, and fits."""
        found = self._windows.get(cap)
        if found is None:
            found = self._windows[cap] = self.window_at(float(self.caps_s[cap]))
        return found

    def window_at(self, cap_s: float) -> Ints:
        """Return the same for a bottleneck that need not be in the grid."""
        index, works = self.problem.paces
        first = np.empty((self.nodes, self.blocks + 1), dtype=np.int64)
        for kind, (forward, backward) in enumerate(works):
            of_kind = index == kind
            work = forward + backward
            reach = cap_s * (1 + _ROUNDING) * self.problem.network.flops[of_kind]
            first[of_kind] = np.searchsorted(work, work[None, :] - reach[:, None])
        return np.maximum(first, self._least_place)

    @property
    def memory_binds(self) -> bool:
        """Whether some node's memory is too small for a stage that any of them could be given."""
        return bool(self._least_place.any()) and not self.problem.whole_blocks

    @cached_property
    def windows(self) -> Ints:
        """[cap, node, j]: all windows."""
        return np.array([self.window(cap) for cap in range(_CAPS)])

    def caps_near(self, cap: int, steps: Sequence[int]) -> list[int]:
        """Return the caps so many steps beside one, within the grid."""
        return sorted({min(_CAPS - 1, max(0, cap + step)) for step in steps})

    def cap_of(self, period_s: float) -> int:
        """Return the index of the smallest bottleneck in the grid that is not below `period_s`."""
        return min(_CAPS - 1, int(np.searchsorted(self.caps_s, period_s * (1 - _ROUNDING))))

    # ---- links ----

    def link_fill(self, source: Ints, target: Ints) -> Singles:
        """[.., place]: seconds that a cut there adds to the fill, for pairs of nodes."""
        forward = (self.transfer[source, target] + self.codec_s[source, target])[..., None]
        backward = (self.back[source, target] + self.codec_back_s[source, target])[..., None]
        found: Singles = forward * self.forward_out + backward * self.backward_out
        found += self.delay[source, target][..., None]
        return found

    def link_busy(self, source: Ints, target: Ints) -> Singles:
        """[.., place]: seconds that a cut there keeps the link busy per micro-batch."""
        forward = self.transfer[source, target][..., None] * self.forward_out
        backward = self.back[source, target][..., None] * self.backward_out
        if self.problem.gpipe:
            return np.asarray(forward + backward)
        return np.asarray(np.maximum(forward, backward))

    # ---- one order of nodes ----

    def best_cuts(self, order: Sequence[int], caps: Sequence[int]) -> Arrangement | None:
        """Return the best arrangement of exactly these nodes in this order by exact evaluation, if there is one."""
        nodes = np.array(order, dtype=np.int64)
        best: tuple[float, Arrangement | None] = (np.inf, None)
        for places in self._cuts(nodes, np.array(caps, dtype=np.int64)):
            found = self.arrange(order, places)
            step_s = self.problem.step_s(found)
            if step_s < best[0]:
                best = (step_s, found)
        return best[1]

    def _cuts(self, nodes: Ints, caps: Ints) -> list[tuple[int, ...]]:
        windows = np.array([self.window(int(cap))[nodes] for cap in caps])  # [cap, stage, j]
        limits = self.limits_s[caps][:, None]
        fill, _ = self.first_stage(nodes[:1], windows[:, 0])
        origins = []
        for stage in range(1, len(nodes)):
            pair = nodes[stage - 1], nodes[stage]
            start = fill + np.where(self.link_busy(*pair) <= limits, self.link_fill(*pair), NEVER)
            value, origin = extend(start - self.seconds[nodes[stage]], windows[:, stage])
            fill = value + self.seconds[nodes[stage]]
            origins.append(origin)
        found: list[tuple[int, ...]] = []
        for row in range(len(caps)):
            if fill[row, -1] < NEVER / 2:
                places = [self.blocks]
                for origin in reversed(origins):
                    places.append(int(origin[row, places[-1]]))
                found.append((0, *reversed(places)))
        return list(dict.fromkeys(found))

    def first_stage(self, nodes: Ints, window: Ints) -> tuple[Singles, Singles]:
        """Return E and M after a first stage on these nodes, [.., place]."""
        seconds = self.seconds[nodes]
        possible = (window <= 0) & (np.arange(self.blocks + 1) > 0)
        return np.where(possible, seconds, NEVER), np.broadcast_to(seconds, possible.shape)


def extend(start: Singles, window: Ints) -> tuple[Singles, Ints]:
    """Return for each j the least start[i] with window[j] <= i < j, and that i. Arrays are [.., place]."""
    places = start.shape[-1]
    index = np.arange(places)
    width = max(1, int((index - window).max()))
    padded = np.full((*start.shape[:-1], places - 1 + width), NEVER, dtype=np.float32)
    padded[..., width:] = start[..., :-1]
    view = sliding_window_view(padded, width, axis=-1)  # [.., j, o]: start[j - width + o]
    allowed = np.arange(width) >= (window - index + width)[..., None]
    masked = np.where(allowed, view, NEVER)
    offset = masked.argmin(axis=-1)
    value = np.take_along_axis(masked, offset[..., None], axis=-1)[..., 0]
    return value, offset + index - width
