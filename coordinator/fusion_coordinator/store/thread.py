"""Runs a store's blocking calls on a thread of its own, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import OperationalError

from fusion.base.errors import UnreachableError
from fusion_coordinator.store.base import Store

P = ParamSpec("P")
R = TypeVar("R")


class StoreThread:
    """Opens a store on its own thread; call its methods through `run`."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")
        self.store: Store

    async def open(self, make: Callable[[], Store]) -> None:
        """Make the store, on its thread."""
        self.store = await self.run(make)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `function`, usually a bound method of the store, returns. UnreachableError: try again later."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))
        except OperationalError as error:  # a full disk, most of all; what was asked has not happened
            raise UnreachableError(
                f"the coordinator's database cannot be used: {error.orig}; free space there"
            ) from None

    async def close(self) -> None:
        """Close the store after everything that was asked before."""
        if hasattr(self, "store"):
            await self.run(self.store.close)
        self._executor.shutdown()
