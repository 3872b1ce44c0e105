"""Which versions of a stage's state are kept, decided in the step alike by all stages.

At most two are live: the newest that all stages have safely, and the one under way. The next is taken once that one is
safe everywhere, and in any case at a checkpoint's step, where it takes the place of the one under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Keeper(Protocol):
    """Where versions go. All is called on the thread that computes, and none waits for a disk or the network."""

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor], *, checkpoint: bool) -> None:
        """Copy the state after `step` now, since training goes on with it, and bring the copy to safety by and by.

        A version that is still under way is given up for this one, unless it is a checkpoint's.
        """
        ...

    def safe_step(self) -> int:
        """Return the newest step that is safe: written here, and acknowledged by the holder of its replica."""
        ...

    def stable(self, step: int) -> None:
        """Learn that all stages have `step` safely: what is older may go, here and of the stages it holds for."""
        ...


class Versions:
    """One stage's part in the decision. Without a keeper no stage ever claims safety, so nothing is kept."""

    def __init__(self, keeper: Keeper | None, start: int, *, every_steps: int, last_step: int) -> None:
        """Take the step that the run starts after, which is safe, and how often there is a checkpoint; 0: never."""
        self._keeper = keeper
        self._every_steps, self._last_step = every_steps, last_step
        self._kept = self._stable = start

    @property
    def safe(self) -> int:
        """What this stage says is safe: the version under way if it is, else the last that was safe everywhere."""
        if self._keeper is None:
            return -1
        return self._kept if self._keeper.safe_step() >= self._kept else self._stable

    def wanted(self, step: int, safe: int) -> bool:
        """Say, at stage 0, whether a version is to be taken after `step`; `safe` is what all stages have."""
        if safe < 0:
            return False
        return self._is_checkpoint(step) or (safe == self._kept and step < self._last_step)

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the version after `step`."""
        if self._keeper is not None:
            self._kept = step
            self._keeper.keep(step, tensors, checkpoint=self._is_checkpoint(step))

    def stable(self, step: int) -> None:
        """Take what stage 0 says is safe everywhere."""
        if self._keeper is not None and step > self._stable:
            self._stable = step
            self._keeper.stable(step)

    def _is_checkpoint(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0
