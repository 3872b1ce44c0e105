"""Event loops for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario in a loop of its own; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())
