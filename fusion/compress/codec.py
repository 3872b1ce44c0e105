"""Codecs at work: a tensor to a frame, and back.

    codec = Codec(parse_codec("int4"), TensorRole.GRADIENT)
    frame = codec.encode(tensor, state, turn)
    tensor = codec.decode(frame, spec, state, turn)

A tensor travels as it is, whatever the codec, where the codec would not make it smaller, where its dtype is no float,
and where it holds Inf or NaN: so an overflow reaches the optimizer's check as it would without a codec.
"""

from __future__ import annotations

import torch

from fusion.base.errors import ConfigError, WireError
from fusion.compress import raw
from fusion.compress.catalog import CodecSpec, TensorRole, largest_frame_bytes, size_bytes
from fusion.compress.decoder import Decoder
from fusion.compress.encoder import Encoder
from fusion.compress.frame import Frame, FrameKind, parse
from fusion.compress.noise import Turn
from fusion.compress.state import EdgeState
from fusion.graph.dag import TensorSpec


class Codec:
    """One codec for one role. It has no state of its own: threads may share it, but not one role of an `EdgeState`."""

    def __init__(self, spec: CodecSpec, role: TensorRole) -> None:
        """ConfigError for error feedback on activations, where it would add other samples' errors."""
        if spec.error_feedback and role is TensorRole.ACTIVATION:
            raise ConfigError(f"codec: {spec.name!r} has error feedback, which is not for activations")
        self.spec = spec
        self.role = role
        self._encoder = Encoder(spec, role)
        self._decoder = Decoder(spec, role)

    def size_bytes(self, tensor: TensorSpec) -> int:
        """Return the bytes that a tensor will have as a frame; exact or an estimate, see `catalog.size_bytes`."""
        return size_bytes(self.spec, tensor, self.role)

    def encode(self, tensor: torch.Tensor, state: EdgeState, turn: Turn) -> Frame:
        """Return the frame of a tensor on any device.

        StateError for a gradient on the mask of a tensor that did not pass here.
        """
        tensor = tensor.detach()
        with torch.no_grad():
            if not self.spec.error_feedback or not tensor.dtype.is_floating_point:
                return self._encoder.encode(tensor, tensor, state, turn)
            return self._encode_with_feedback(tensor, state, turn)

    def decode(
        self, frame: Frame, spec: TensorSpec, state: EdgeState, turn: Turn, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """Return the tensor of a frame that must be of this codec and of `spec`; WireError if anything is off.

        Nothing is allocated beyond what `spec` needs, and `state` changes only when all went well.
        """
        layout = frame.layout
        if (layout.dtype, layout.shape) != (spec.dtype, spec.shape):
            shape, expected = list(layout.shape[:16]), list(spec.shape)
            raise WireError(f"tensor: {layout.dtype[:20]} {shape} where {spec.dtype} {expected} is expected")
        raw.check_layout(layout)
        if len(frame.payload) > largest_frame_bytes(spec):
            raise WireError(f"frame: {len(frame.payload)} bytes, at most {largest_frame_bytes(spec)} are expected")
        header, sections = parse(frame.payload)
        if header.dtype != layout.dtype:
            raise WireError(f"frame: of {header.dtype}, but the message's header says {layout.dtype}")
        with torch.no_grad():
            return self._decoder.decode(header, sections, layout, state, turn, torch.device(device))

    def _encode_with_feedback(self, tensor: torch.Tensor, state: EdgeState, turn: Turn) -> Frame:
        """Encode the tensor and what the ones before it lost, and remember what is lost now."""
        residual = state.residuals.get(self.role)
        if residual is not None and residual.shape != tensor.shape:  # a smaller last micro-batch
            return self._encoder.encode(tensor, tensor, state, turn)
        source = tensor.float() if residual is None else tensor + residual.to(tensor.device)
        frame = self._encoder.encode(tensor, source, state, turn)
        if parse(frame.payload)[0].kind is FrameKind.RAW:  # without the residual, which waits for the next
            return frame
        arrived = self.decode(frame, TensorSpec(frame.layout.dtype, frame.layout.shape), state, turn, tensor.device)
        state.residuals[self.role] = (source - arrived).float()
        return frame
