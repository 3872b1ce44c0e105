"""Frames for tests of codecs: round trips, and bytes that nobody would send."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch

from fusion.compress.catalog import TensorRole, parse_codec, parse_pair
from fusion.compress.codec import Codec
from fusion.compress.frame import Frame
from fusion.compress.noise import Turn
from fusion.compress.state import EdgeState
from fusion.graph.dag import TensorSpec

TURN = Turn(job_seed=11, step=7, micro_batch=2, edge=3)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class Edge:
    """Both ends of an edge with a pair of codecs."""

    def __init__(self, pair: str, turn: Turn = TURN, **state: Any) -> None:
        self.pair = parse_pair(pair)
        self.producer, self.consumer = EdgeState(**state), EdgeState(**state)
        self.turn = turn
        self.ahead = Codec(self.pair.forward, TensorRole.ACTIVATION)
        self.back = Codec(self.pair.backward, TensorRole.GRADIENT)

    def forward(self, tensor: torch.Tensor) -> tuple[Frame, torch.Tensor]:
        frame = self.ahead.encode(tensor, self.producer, self.turn)
        return frame, self.ahead.decode(frame, spec_of(tensor), self.consumer, self.turn)

    def backward(self, tensor: torch.Tensor) -> tuple[Frame, torch.Tensor]:
        frame = self.back.encode(tensor, self.consumer, self.turn)
        return frame, self.back.decode(frame, spec_of(tensor), self.producer, self.turn)


def one_way(name: str, tensor: torch.Tensor, role: TensorRole = TensorRole.WEIGHTS) -> tuple[Frame, torch.Tensor]:
    """Send a tensor with one codec between two fresh ends."""
    codec = Codec(parse_codec(name), role)
    frame = codec.encode(tensor, EdgeState(), TURN)
    return frame, codec.decode(frame, spec_of(tensor), EdgeState(), TURN)


def resealed(payload: bytes | bytearray) -> bytes:
    """Return a frame whose checksum fits what somebody has done to it."""
    data = bytearray(payload)
    checksum = zlib.crc32(data[16:], zlib.crc32(data[:12]))
    struct.pack_into("<I", data, 12, checksum)
    return bytes(data)
