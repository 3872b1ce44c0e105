"""What each link of a stage did in one step, from the transport's counters, which only grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fusion.base.ids import StageIndex
from fusion.transport.assembler import ReceiveCounters
from fusion.transport.outbox import SendCounters
from fusion_node.ipc import Received, Sending

Counters = Callable[[], Mapping[StageIndex, tuple[SendCounters, ReceiveCounters]]]


class LinkMeter:
    """Tells the difference to the last time that it was asked."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._before = self._read()

    def _read(self) -> dict[StageIndex, tuple[SendCounters, ReceiveCounters]]:
        return {peer: (replace(sent), replace(got)) for peer, (sent, got) in self._counters().items()}

    def step(self) -> tuple[dict[int, Sending], dict[int, Received]]:
        """Return how sending to each peer went, and what came from each, since the last call; idle links left out."""
        now, before = self._read(), self._before
        self._before = now
        sending, received = {}, {}
        for peer, (sent, got) in now.items():
            sent_before, got_before = before[peer]
            if sent.payload_bytes > sent_before.payload_bytes:
                busy_s = sent.sending_s - sent_before.sending_s
                sending[int(peer)] = Sending(busy_s, sent.blocked_s - sent_before.blocked_s)
            if got.timed_bytes > got_before.timed_bytes:
                count = got.timed_bytes - got_before.timed_bytes
                received[int(peer)] = Received(count, got.busy_s - got_before.busy_s)
        return sending, received
