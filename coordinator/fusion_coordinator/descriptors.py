"""How many connections this process may have open."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, as far as the system lets us; return the soft limit.

    Every node holds a connection open, and many systems let a process have 1,024 files unless it asks for more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS names a hard limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
