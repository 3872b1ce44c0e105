"""Runs a module as `python -m` would, and ends it once the process that started it is gone.

    python -m fusion.cli.child MODULE [ARGUMENT...]

The parent holds the other end of our standard input and writes nothing. When it ends, in whatever way, the kernel
closes that pipe: this process then gets SIGTERM, and a few seconds later SIGKILL with its whole group. Unlike a
parent-death signal this works on every Unix, and whichever thread of the parent started us.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 8.0


def main() -> None:
    """Run the module that the command line names."""
    parent, (ours, passed_on) = os.dup(0), os.pipe()
    os.dup2(ours, 0)
    os.close(ours)
    threading.Thread(target=_end_with_parent, args=(parent, passed_on), name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent(parent: int, passed_on: int) -> None:
    """Pass on to the module what the parent says; when it says no more, it is gone."""
    while said := os.read(parent, 2**16):
        os.write(passed_on, said)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
