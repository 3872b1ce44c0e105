"""Copies of kept states at another stage's worker: the messages, the sending end and the holding end."""

from __future__ import annotations

from fusion.base.units import KIB

PART_BYTES = 512 * KIB  #: of a replica in one message: one frame, so that values and gradients pass between two
ANSWER_BYTES = 64
