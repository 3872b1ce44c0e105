"""What one end of an edge remembers between tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import StateError
from fusion.compress.catalog import TensorRole
from fusion.compress.noise import Turn

_RESIDUAL, _BASIS = "residual.", "basis."


@dataclass(frozen=True, slots=True)
class Mask:
    """The places that a forward tensor kept, until its gradient has passed. None: it kept all."""

    places: npt.NDArray[np.int32] | npt.NDArray[np.int64] | None
    checksum: int = 0  #: crc32 of the places on the wire: both ends must have the same


@dataclass(slots=True)
class EdgeState:
    """One end of one edge. Residuals and bases are the stage's state: they belong into its checkpoints."""

    masks: dict[tuple[int, int], Mask] = field(default_factory=dict)  #: by (step, micro-batch)
    residuals: dict[TensorRole, torch.Tensor] = field(default_factory=dict)  #: float32, in the shape of the tensors
    bases: dict[TensorRole, torch.Tensor] = field(default_factory=dict)  #: of lowrank, float32 (columns, rank)
    #: measured goodput of the link; decides whether zstd pays. None: unknown, and zstd is not used on values.
    rate_bytes_per_s: float | None = None

    def keep_mask(self, turn: Turn, mask: Mask) -> None:
        """Remember a forward tensor's mask, if a gradient will come."""
        if turn.expects_gradient:
            self.masks[turn.step, turn.micro_batch] = mask

    def drop_mask(self, turn: Turn) -> None:
        """Forget the mask of a micro-batch whose gradient has passed, or does not exist."""
        self.masks.pop((turn.step, turn.micro_batch), None)

    def forget_before(self, step: int) -> None:
        """Forget masks of earlier steps, whose gradients will never come; other threads may add masks meanwhile."""
        for key in list(self.masks):
            if key[0] < step:
                self.masks.pop(key, None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint at a step's end must hold. Masks live within a step only and are left out."""
        residuals = {f"{_RESIDUAL}{role}": tensor for role, tensor in self.residuals.items()}
        return residuals | {f"{_BASIS}{role}": tensor for role, tensor in self.bases.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put a checkpoint's tensors in place of the present ones; StateError for a name that is none of ours."""
        residuals: dict[TensorRole, torch.Tensor] = {}
        bases: dict[TensorRole, torch.Tensor] = {}
        roles = {str(role): role for role in TensorRole}
        for name, tensor in state.items():
            for prefix, target in ((_RESIDUAL, residuals), (_BASIS, bases)):
                if name.startswith(prefix) and name.removeprefix(prefix) in roles:
                    target[roles[name.removeprefix(prefix)]] = tensor.clone()
                    break
            else:
                raise StateError(f"codec state: {name[:60]!r} is neither residual.ROLE nor basis.ROLE")
        self.residuals, self.bases, self.masks = residuals, bases, {}
