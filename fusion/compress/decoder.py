"""From a frame to a tensor. Every number of the frame is compared with what is expected before it is used."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import WireError
from fusion.base.layout import TensorLayout
from fusion.compress import lowrank, raw, support
from fusion.compress.catalog import FACTORS, FLOATS, CodecSpec, Kind, TensorRole, Values, kept_elements, matrix_shape
from fusion.compress.frame import Buffer, FrameHeader, FrameKind, Section, open_section
from fusion.compress.noise import Noise, Turn
from fusion.compress.state import EdgeState, Mask
from fusion.compress.values import as_dtype, decode_values, is_blocked, sizes
from fusion.graph.dag import DTYPE_BYTES

_SPARE = 63  #: room behind a tensor, for the rest of its last block
_KINDS = {
    Kind.DENSE: {FrameKind.DENSE},
    Kind.TOPK: {FrameKind.SPARSE, FrameKind.DENSE},
    Kind.ADATOPK: {FrameKind.SPARSE_WIDE},
    Kind.MASK: {FrameKind.SPARSE, FrameKind.DENSE},
    Kind.LOWRANK: {FrameKind.LOWRANK},
}


class Decoder:
    """Decodes frames of one role and one codec; of another codec only those that hold the elements as they are."""

    def __init__(self, spec: CodecSpec, role: TensorRole) -> None:
        self._spec = spec
        self._role = role
        self._masked_way_back = spec.kind is Kind.MASK and role is TensorRole.GRADIENT
        self._sparse_codec = spec.kind in (Kind.TOPK, Kind.MASK)
        self._kinds = {FrameKind.RAW} | _KINDS[spec.kind]
        if self._masked_way_back:
            self._kinds = {FrameKind.RAW, FrameKind.DENSE, FrameKind.ON_MASK}

    def decode(
        self,
        header: FrameHeader,
        sections: list[Section],
        layout: TensorLayout,
        state: EdgeState,
        turn: Turn,
        device: torch.device,
    ) -> torch.Tensor:
        """Return the tensor; WireError, and nothing changed, for a frame that this codec does not make."""
        if header.kind not in self._kinds:
            raise WireError(f"frame: kind {header.kind.name} where {self._spec.name} is agreed")
        if header.kind is not FrameKind.RAW and (header.values, layout.dtype in FLOATS) != (self._spec.values, True):
            raise WireError(f"frame: {header.values} of {layout.dtype} where {self._spec.name} is agreed")
        if header.kind is FrameKind.DENSE and self._sparse_codec and not self._masked_way_back:
            self._check_all_fit(header, layout)
        if self._masked_way_back:
            return self._on_mask(header, sections, layout, state, turn, device)
        tensor, mask = self._by_kind(header.kind)(header, sections, layout, device, turn)
        if self._spec.kind is Kind.MASK:
            state.keep_mask(turn, mask)
        return tensor

    def _check_all_fit(self, header: FrameHeader, layout: TensorLayout) -> None:
        """Refuse a dense frame of a sparse codec, unless its ratio is so mild that all elements fit."""
        count = math.prod(layout.shape)
        if kept_elements(self._spec, count, DTYPE_BYTES[layout.dtype]) < count:
            raise WireError(f"frame: kind {header.kind.name} where {self._spec.name} is agreed")

    def _by_kind(self, kind: FrameKind) -> Callable[..., tuple[torch.Tensor, Mask]]:
        if kind in (FrameKind.RAW, FrameKind.DENSE):
            return self._dense
        return self._lowrank if kind is FrameKind.LOWRANK else self._sparse

    def _dense(
        self, header: FrameHeader, sections: list[Section], layout: TensorLayout, device: torch.device, turn: Turn
    ) -> tuple[torch.Tensor, Mask]:
        count = raw.payload_bytes(layout) // DTYPE_BYTES[layout.dtype]
        if header.elements != count or header.kept != count:
            raise WireError(f"frame: {header.kept} of {header.elements} elements where {count} are expected")
        values = Values.NONE if header.kind is FrameKind.RAW else header.values
        dtype: torch.dtype = getattr(torch, layout.dtype)
        opened = _open_all(sections, sizes(values, count, dtype))
        place = raw.Place(layout, device, _SPARE)
        out = place.dense if dtype is torch.float32 and is_blocked(values) else None
        dither = None
        if self._spec.rounding == "dither" and header.kind is FrameKind.DENSE:
            dither = Noise(turn.seed(self._role), count, device, dithers=True)
        flat = decode_values(values, opened, count, dtype, device, out, dither)
        if out is None and count:
            place.fill(as_dtype(flat, dtype))
        return place.tensor, Mask(None)

    def _sparse(
        self, header: FrameHeader, sections: list[Section], layout: TensorLayout, device: torch.device, _turn: Turn
    ) -> tuple[torch.Tensor, Mask]:
        count = _all_elements(header, layout)
        if header.kept > count or not sections:
            raise WireError(f"frame: {header.kept} kept of {count} elements")
        wide = header.kind is FrameKind.SPARSE_WIDE
        most = 8 * header.kept if wide else support.largest_gap_bytes(header.kept, count)
        index = open_section(sections[0], min(sections[0].raw_bytes, most))
        if zlib.crc32(index) != header.places:
            raise WireError("frame: the places are not those of its header")
        where = (support.read_wide if wide else support.read_gaps)(index, header.kept, count)
        tensor = _scattered(header, sections[1:], where, layout, device)
        narrow = where.astype(np.int32) if count < 2**31 else where
        return tensor, Mask(narrow, header.places)

    def _on_mask(
        self,
        header: FrameHeader,
        sections: list[Section],
        layout: TensorLayout,
        state: EdgeState,
        turn: Turn,
        device: torch.device,
    ) -> torch.Tensor:
        mask = state.masks.get((turn.step, turn.micro_batch))
        if mask is None:
            raise WireError("frame: a gradient for the mask of a tensor that was not sent")
        if mask.places is None or header.kind is not FrameKind.ON_MASK:
            if header.kind is FrameKind.ON_MASK or (mask.places is not None and header.kind is FrameKind.DENSE):
                raise WireError(f"frame: kind {header.kind.name} does not fit the mask of the tensor that was sent")
            tensor, _ = self._dense(header, sections, layout, device, turn)
            if mask.places is not None:
                tensor = _kept_only(tensor, mask.places, layout)
        else:
            count = _all_elements(header, layout)
            if (header.kept, header.places) != (len(mask.places), mask.checksum) or not _within(mask.places, count):
                raise WireError(f"frame: values for another mask: {header.kept} where {len(mask.places)} were sent")
            tensor = _scattered(header, sections, mask.places, layout, device)
        state.drop_mask(turn)
        return tensor

    def _lowrank(
        self, header: FrameHeader, sections: list[Section], layout: TensorLayout, device: torch.device, _turn: Turn
    ) -> tuple[torch.Tensor, Mask]:
        _all_elements(header, layout)
        shape, rank = matrix_shape(layout.shape), header.kept
        if not 1 <= rank <= min(shape):
            raise WireError(f"frame: rank {rank} of a matrix {shape}")
        expected = [sizes(FACTORS, rank * side, torch.float32) for side in shape]
        opened = _open_all(sections, (*expected[0], *expected[1]))
        parts = (opened[: len(expected[0])], opened[len(expected[0]) :])
        p, q = (
            decode_values(FACTORS, part, rank * side, torch.float32, device).view(rank, side)
            for part, side in zip(parts, shape, strict=True)
        )
        place = raw.Place(layout, device)
        place.fill_in_order(as_dtype(lowrank.multiply(p, q), place.tensor.dtype))
        return place.tensor, Mask(None)


def _all_elements(header: FrameHeader, layout: TensorLayout) -> int:
    """Return the number of elements of a tensor that is written in the order of its indices."""
    count = math.prod(layout.shape)
    if header.elements != count:
        raise WireError(f"frame: {header.elements} elements where {count} are expected")
    if layout != raw.unrepeated(layout):
        raise WireError(f"frame: kind {header.kind.name} of a tensor with repeated elements")
    return count


def _open_all(sections: list[Section], expected: tuple[int, ...]) -> list[Buffer]:
    if len(sections) != len(expected):
        raise WireError(f"frame: {len(sections)} sections where {len(expected)} are expected")
    return [open_section(section, size) for section, size in zip(sections, expected, strict=True)]


def _scattered(
    header: FrameHeader,
    sections: list[Section],
    where: npt.NDArray[np.integer],
    layout: TensorLayout,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor of zeros with the values of `sections` at `where`."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    opened = _open_all(sections, sizes(header.values, header.kept, dtype))
    chosen = as_dtype(decode_values(header.values, opened, header.kept, dtype, device), dtype)
    return _spread(chosen, where, layout)


def _spread(chosen: torch.Tensor, where: npt.NDArray[np.integer], layout: TensorLayout) -> torch.Tensor:
    places = torch.from_numpy(where).to(chosen.device).long()
    place = raw.Place(layout, chosen.device)
    if place.tensor.is_contiguous():
        place.tensor.zero_().view(-1).scatter_(0, places, chosen)
    else:
        flat = torch.zeros(place.tensor.numel(), dtype=chosen.dtype, device=chosen.device)
        place.fill_in_order(flat.scatter_(0, places, chosen))
    return place.tensor


def _kept_only(tensor: torch.Tensor, where: npt.NDArray[np.integer], layout: TensorLayout) -> torch.Tensor:
    """Return a gradient that came as it is, without what its tensor's mask has left out."""
    if not _within(where, tensor.numel()):
        raise WireError(f"frame: a gradient of {tensor.numel()} elements for a larger tensor's mask")
    places = torch.from_numpy(where).to(tensor.device)
    return _spread(tensor.reshape(-1).index_select(0, places), where, raw.unrepeated(layout))


def _within(where: npt.NDArray[np.integer], count: int) -> bool:
    return len(where) == 0 or int(where[-1]) < count
