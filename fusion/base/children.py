"""What a process of ours gives to one that it starts."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType


def child_environment(packages: Iterable[ModuleType], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment (default: our own) with a PYTHONPATH on which a child finds these very packages."""
    environment = dict(os.environ if base is None else base)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    roots = [str(Path(str(package.__file__)).resolve().parents[1]) for package in packages]
    # Only of a checkout: site-packages on PYTHONPATH would come before the standard library.
    paths = [root for root in roots if root not in installed]
    if "PYTHONPATH" in environment:
        paths.append(environment["PYTHONPATH"])
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment
