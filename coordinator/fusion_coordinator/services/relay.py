"""What nodes call to reach each other through the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fusion.base.errors import WireError
from fusion.base.ids import NodeId
from fusion.wire.v1 import relay_pb2, relay_pb2_grpc
from fusion_coordinator.relay import RelayHub
from fusion_coordinator.services.guard import who

_Frames = AsyncIterator[relay_pb2.RelayFrame]


class RelayService(relay_pb2_grpc.RelayServicer):
    """Both ends of relayed connections."""

    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub

    async def Connect(self, request_iterator: _Frames, context: Any) -> _Frames:  # noqa: N802
        """Reach the node that the first frame names."""
        target = await _first(request_iterator, "target")
        async for item in self._hub.connect(NodeId(who(context).identity), NodeId(target), _data(request_iterator)):
            yield _frame(item)

    async def Accept(self, request_iterator: _Frames, context: Any) -> _Frames:  # noqa: N802
        """Be the other end of the connection that the first frame names."""
        name = await _first(request_iterator, "connection")
        async for item in self._hub.accept(NodeId(who(context).identity), name, _data(request_iterator)):
            yield _frame(item)


async def _first(frames: _Frames, kind: str) -> str:
    async for frame in frames:
        if frame.WhichOneof("body") != kind:
            break
        return str(getattr(frame, kind))
    raise WireError(f"the first frame must have a {kind}")


async def _data(frames: _Frames) -> AsyncIterator[bytes]:
    async for frame in frames:
        if frame.WhichOneof("body") != "data":
            raise WireError("only data may follow the first frame")
        yield frame.data


def _frame(item: bytes | None) -> relay_pb2.RelayFrame:
    if item is None:
        return relay_pb2.RelayFrame(opened=relay_pb2.RelayOpened())
    return relay_pb2.RelayFrame(data=item)
