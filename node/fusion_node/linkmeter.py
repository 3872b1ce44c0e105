"""What each link of a stage did in one step, from the counters of transport and codecs, which only grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fusion.base.ids import StageIndex
from fusion.runtime.coding import CodingCounters, StageCoder
from fusion.transport.assembler import ReceiveCounters
from fusion.transport.outbox import SendCounters
from fusion_node.ipc import Received, Sending

Counters = Callable[[], Mapping[StageIndex, tuple[SendCounters, ReceiveCounters]]]


class LinkMeter:
    """Tells the difference to the last time that it was asked."""

    def __init__(self, counters: Counters, coder: StageCoder) -> None:
        self._counters = counters
        self._coder = coder
        self._before = self._read()
        self._coded_before = coder.counters()

    def _read(self) -> dict[StageIndex, tuple[SendCounters, ReceiveCounters]]:
        return {peer: (replace(sent), replace(got)) for peer, (sent, got) in self._counters().items()}

    def step(self, step: int, waited_s: Mapping[StageIndex, float]) -> tuple[dict[int, Sending], dict[int, Received]]:
        """Return how sending to each peer went, and what came from each, since the last call; idle links left out.

        `step` is the one that is over, and `waited_s` how long the stage waited in it for each peer.
        """
        now, before = self._read(), self._before
        coded, coded_before = self._coder.counters(), self._coded_before
        self._before, self._coded_before = now, coded
        stage, nothing = self._coder.stage, CodingCounters()
        sending, received = {}, {}
        for peer, (sent, got) in now.items():
            sent_before, got_before = before[peer]
            out, out_before = (found.get((stage, peer), nothing) for found in (coded, coded_before))
            into, into_before = (found.get((peer, stage), nothing) for found in (coded, coded_before))
            if sent.payload_bytes > sent_before.payload_bytes:
                sending[int(peer)] = Sending(
                    sent.sending_s - sent_before.sending_s,
                    sent.blocked_s - sent_before.blocked_s,
                    out.raw_bytes - out_before.raw_bytes,
                    out.coded_bytes - out_before.coded_bytes,
                    out.encode_s - out_before.encode_s,
                    self._coder.codec(stage, peer, step).name,
                )
            if got.payload_bytes > got_before.payload_bytes:
                received[int(peer)] = Received(
                    got.timed_bytes - got_before.timed_bytes,
                    got.busy_s - got_before.busy_s,
                    into.decode_s - into_before.decode_s,
                    waited_s.get(peer, 0.0),
                    got.timed_messages - got_before.timed_messages,
                )
        return sending, received
