"""A coordinator may have as many connections open as its system allows."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from fusion_coordinator.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "512 (512, 512)\n"
