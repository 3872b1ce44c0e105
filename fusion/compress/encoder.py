"""From a tensor to a frame. `tensor` is what was given; `source` is the same plus what error feedback adds."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import StateError
from fusion.base.layout import TensorLayout
from fusion.compress import lowrank, raw, support
from fusion.compress.catalog import (
    FACTORS,
    FLOATS,
    CodecSpec,
    Kind,
    TensorRole,
    Values,
    frame_bytes,
    kept_elements,
    lowrank_rank,
    matrix_shape,
)
from fusion.compress.frame import Buffer, Frame, FrameHeader, FrameKind, Lossless, pack, zstd_pays
from fusion.compress.noise import Noise, Turn
from fusion.compress.state import EdgeState, Mask
from fusion.compress.values import encode_values, sizes
from fusion.graph.dag import TensorSpec


class Encoder:
    """Encodes the tensors of one role with one codec."""

    def __init__(self, spec: CodecSpec, role: TensorRole) -> None:
        self._spec = spec
        self._role = role
        self._stochastic = spec.stochastic(role)

    def encode(self, tensor: torch.Tensor, source: torch.Tensor, state: EdgeState, turn: Turn) -> Frame:
        """Return the frame: the codec's where it is possible and smaller, else the elements as they are."""
        spec = self._spec
        if spec.kind is Kind.MASK and self._role is TensorRole.GRADIENT:
            return self._on_mask(tensor, state, turn)
        frame = None
        if tensor.numel() and _dtype_of(tensor) in FLOATS:
            if spec.kind is Kind.DENSE:
                frame = self._dense(tensor, source, state, turn)
            elif spec.kind is Kind.LOWRANK:
                frame = self._lowrank(tensor, source, state)
            else:
                frame = self._sparse(tensor, source, state, turn)
        if frame is None:
            frame = self._raw(tensor, state)
            if spec.kind is Kind.MASK:
                state.keep_mask(turn, Mask(None))
        return frame

    def _raw(self, tensor: torch.Tensor, state: EdgeState) -> Frame:
        layout, flat = raw.flatten(tensor)
        header = FrameHeader(FrameKind.RAW, Values.NONE, layout.dtype, flat.numel(), flat.numel())
        return self._packed(layout, header, [raw.memory_of(flat.to("cpu"))], state)

    def _dense(self, tensor: torch.Tensor, source: torch.Tensor, state: EdgeState, turn: Turn) -> Frame | None:
        layout, flat = raw.flatten(source, raw.layout_of(tensor))
        count, values = flat.numel(), self._spec.values
        if not _smaller(sizes(values, count, tensor.dtype), tensor):
            return None
        sections = encode_values(values, flat, self._noise(turn, flat))
        if sections is None:
            return None
        return self._packed(layout, FrameHeader(FrameKind.DENSE, values, layout.dtype, count, count), sections, state)

    def _sparse(self, tensor: torch.Tensor, source: torch.Tensor, state: EdgeState, turn: Turn) -> Frame | None:
        spec, flat = self._spec, source.reshape(-1)
        wide = spec.kind is Kind.ADATOPK
        kept = kept_elements(spec, flat.numel(), tensor.element_size())
        if kept >= flat.numel() and not wide:
            frame = self._dense(tensor, source, state, turn)
            if frame is not None and spec.kind is Kind.MASK:
                state.keep_mask(turn, Mask(None))
            return frame
        places = support.select(flat, kept, exact=spec.threshold == "exact")
        if places is None:
            return None
        chosen = flat.index_select(0, places)
        values = encode_values(spec.values, _as_sent(chosen, spec.values, tensor), self._noise(turn, chosen))
        where = places.cpu().numpy()
        index: Buffer = where.tobytes() if wide else support.write_gaps(where)
        if values is None or not _smaller([len(index), *map(len, values)], tensor):
            return None
        checksum = zlib.crc32(index)
        if spec.kind is Kind.MASK:
            state.keep_mask(turn, Mask(_narrow(where, flat.numel()), checksum))
        kind = FrameKind.SPARSE_WIDE if wide else FrameKind.SPARSE
        layout = raw.unrepeated(raw.layout_of(tensor))
        header = FrameHeader(kind, spec.values, layout.dtype, flat.numel(), len(where), checksum)
        return self._packed(layout, header, [index, *values], state, gaps=not wide)

    def _on_mask(self, tensor: torch.Tensor, state: EdgeState, turn: Turn) -> Frame:
        mask = state.masks.get((turn.step, turn.micro_batch))
        if mask is None:
            raise StateError(
                f"edge {turn.edge}, step {turn.step}, micro-batch {turn.micro_batch}: a gradient for the mask of a "
                f"tensor that did not pass here"
            )
        frame = None
        if tensor.numel() and _dtype_of(tensor) in FLOATS:
            if mask.places is None:
                frame = self._dense(tensor, tensor, state, turn)
            else:
                frame = self._values_on(tensor, mask.places, mask.checksum, state, turn)
        frame = frame or self._raw(tensor, state)
        state.drop_mask(turn)
        return frame

    def _values_on(
        self, tensor: torch.Tensor, where: npt.NDArray[np.integer], checksum: int, state: EdgeState, turn: Turn
    ) -> Frame | None:
        values, places = self._spec.values, torch.from_numpy(where).to(tensor.device)
        if len(where) and where[-1] >= tensor.numel():
            raise StateError(f"edge {turn.edge}: a gradient of {tensor.numel()} elements for a larger tensor's mask")
        if not _smaller(sizes(values, len(where), tensor.dtype), tensor):
            return None
        chosen = tensor.reshape(-1).index_select(0, places)
        sections = encode_values(values, chosen, self._noise(turn, chosen))
        if sections is None:
            return None
        layout = raw.unrepeated(raw.layout_of(tensor))
        header = FrameHeader(FrameKind.ON_MASK, values, layout.dtype, tensor.numel(), len(where), checksum)
        return self._packed(layout, header, sections, state)

    def _lowrank(self, tensor: torch.Tensor, source: torch.Tensor, state: EdgeState) -> Frame | None:
        about = TensorSpec(_dtype_of(tensor), tuple(tensor.shape))
        shape, rank = matrix_shape(about.shape), lowrank_rank(self._spec, about)
        parts = [size for side in shape for size in sizes(FACTORS, rank * side, torch.float32)]
        if not _smaller(parts, tensor):
            return None
        factors = lowrank.factorise(source.reshape(shape).float(), rank, state.bases.get(self._role))
        if factors is None:
            return None
        sections: list[Buffer] = []
        for factor in factors:
            encoded = encode_values(FACTORS, factor.T.reshape(-1))
            if encoded is None:
                return None
            sections += encoded
        if bool(factors[1].any()):
            state.bases[self._role] = factors[1]
        layout = raw.unrepeated(raw.layout_of(tensor))
        header = FrameHeader(FrameKind.LOWRANK, FACTORS, layout.dtype, about.elements, rank)
        return self._packed(layout, header, sections, state)

    def _noise(self, turn: Turn, flat: torch.Tensor) -> Noise | None:
        if not self._stochastic:
            return None
        return Noise(turn.seed(self._role), flat.numel(), flat.device, dithers=self._spec.rounding == "dither")

    def _packed(
        self,
        layout: TensorLayout,
        header: FrameHeader,
        sections: Sequence[Buffer],
        state: EdgeState,
        *,
        gaps: bool = False,
    ) -> Frame:
        """Return the frame; gaps between places always go through zstd, the rest as the codec says."""
        lossless = [self._lossless(section, state) for section in sections]
        if gaps:
            lossless[0] = Lossless.SYMBOLS
        return Frame(layout, pack(header, sections, lossless))

    def _lossless(self, section: Buffer, state: EdgeState) -> Lossless:
        wanted = self._spec.lossless == "zstd"
        if self._spec.lossless == "auto":
            wanted = zstd_pays(section, state.rate_bytes_per_s)
        return Lossless.ZSTD if wanted else Lossless.PLAIN


def _smaller(sections: Sequence[int], tensor: torch.Tensor) -> bool:
    """Whether these sections are smaller than the tensor as it is, repeated elements once."""
    return frame_bytes(tuple(sections)) < frame_bytes((raw.payload_bytes(raw.layout_of(tensor)),))


def _as_sent(chosen: torch.Tensor, values: Values, tensor: torch.Tensor) -> torch.Tensor:
    """Values that go as they are go in the tensor's own dtype, also when error feedback has made it float32."""
    return chosen.to(tensor.dtype) if values is Values.NONE else chosen


def _narrow(places: npt.NDArray[np.int64], elements: int) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    return places.astype(np.int32) if elements < 2**31 else places


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
