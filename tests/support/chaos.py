"""Links between the processes of a cluster that fail on demand: the WAN relay, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from fusion.cli.wan import Machine, WanLink, WanRelay
from fusion.cli.wanfaults import Fault, Kind

COORDINATOR = "coordinator"
_PLACE = "here"


class Chaos:
    """A relay between all pairs of machines, named by their addresses; `with` starts and ends it."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._machines = [Machine(name, _PLACE, address) for name, address in addresses.items()]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos", daemon=True)
        self._relay = WanRelay([WanLink(_PLACE, _PLACE, 0, 0)], self._machines)
        #: by dialling machine: what to dial instead of each address
        self.routes: dict[str, dict[str, str]] = {}

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self.routes = asyncio.run_coroutine_threadsafe(self._relay.start(), self._loop).result(20)

    def close(self) -> None:
        """End every connection."""
        asyncio.run_coroutine_threadsafe(self._relay.close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _apply(self, fault: Fault) -> None:
        async def apply() -> None:
            self._relay.apply(fault)

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(10)

    def ways(self, one: str, other: str, how: Literal["both", "there"] = "both") -> tuple[tuple[str, str], ...]:
        """Return the ways between two machines; "there": only from the first to the second."""
        return ((one, other), (other, one)) if how == "both" else ((one, other),)

    def cut(self, one: str, other: str, kind: Kind = "stall", how: Literal["both", "there"] = "both") -> None:
        """Make the link between two machines fail."""
        self._apply(Fault(kind, self.ways(one, other, how)))

    def isolate(self, name: str) -> None:
        """Partition a machine from all others."""
        others = [machine.name for machine in self._machines if machine.name != name]
        self._apply(Fault("stall", tuple(way for other in others for way in self.ways(name, other))))

    def shape(
        self, one: str, other: str, rate_bytes_per_s: float = 0.0, delay_s: float = 0.0, jitter_s: float = 0.0
    ) -> None:
        """Give both directions between two machines another rate, delay and jitter."""
        self._apply(Fault("shape", self.ways(one, other), rate_bytes_per_s, delay_s, jitter_s))

    def heal(self) -> None:
        """Make every link whole again."""
        names = [machine.name for machine in self._machines]
        self._apply(Fault("heal", tuple((one, other) for one in names for other in names if one != other)))

    @contextmanager
    def cutting(
        self, one: str, other: str, kind: Kind = "stall", how: Literal["both", "there"] = "both"
    ) -> Iterator[None]:
        """Make a link fail during the block."""
        self.cut(one, other, kind, how)
        yield
        self.heal()
