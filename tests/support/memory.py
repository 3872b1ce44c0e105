"""How much memory tensors take while something runs, counted where torch makes them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # by address, while alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, count = storage.data_ptr(), storage.nbytes()
        if not count or address in self._known:
            return
        self._known[address] = count
        self.now += count
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        self.now -= self._known.pop(address, 0)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Count inside the block."""
    with LiveBytes() as mode:
        yield mode
