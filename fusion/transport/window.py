"""The credit window of one directed link: how much may be under way or wait here without having been used."""

from __future__ import annotations

from fusion.base.units import GIB, MIB

__all__ = ["FIRST_WINDOW_BYTES", "MOST_WINDOW_BYTES", "Window"]

FIRST_WINDOW_BYTES = 16 * MIB  #: while nothing is known of the path, where memory allows
MOST_WINDOW_BYTES = GIB  #: of one link, whatever the memory
_PATHS = 2  #: what is on its way, and the credit on its way back while more is sent


class Window:
    """Payload bytes that a peer may have announced and not been credited back.

    It begins with `first_bytes`, which hold all that may wait to be used at a time, and grows with what the path holds:
    round trip time times goodput, as the sender measures them. It stays within `most_bytes`, the memory's share, and
    never shrinks, because the sender counts on it. Without `most_bytes` it stays as it is.
    """

    def __init__(self, first_bytes: int, most_bytes: int = 0) -> None:
        self.bytes = self._first_bytes = first_bytes
        self._most_bytes = most_bytes

    def follow(self, path_bytes: int) -> None:
        """Take the sender's word for what the path holds; 0: not known."""
        self.bytes = max(self.bytes, min(self._most_bytes, self._first_bytes + _PATHS * path_bytes))
