"""FusionLLM: train one PyTorch model on machines in different places.

Everything public is here; nothing heavy (torch, gRPC) is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion.base.errors import (
        AuthError,
        CaptureError,
        ConfigError,
        DataError,
        FusionError,
        GraphError,
        JobError,
        NotFoundError,
        NumericError,
        PlanError,
        StateError,
        UnreachableError,
        UsageError,
        WireError,
    )
    from fusion.job.job import Job
    from fusion.job.nodepath import NodePath, Rows, Window
    from fusion.job.run import LocalRun, Run, attach
    from fusion.job.settings import SGD, Adam, AdamW, Checkpoint, Constant, Cosine, Linear, tokens
    from fusion.job.tensordata import TensorData
    from fusion.job.tokendata import TextData, TokenData
    from fusion.protocol.jobstatus import JobState, JobStatus, LogLine
    from fusion.protocol.metrics import StepMetrics

__version__ = "0.1.0"

#: Public name -> the module that has it.
_HOMES = {
    "fusion.base.errors": (
        "AuthError",
        "CaptureError",
        "ConfigError",
        "DataError",
        "FusionError",
        "GraphError",
        "JobError",
        "NotFoundError",
        "NumericError",
        "PlanError",
        "StateError",
        "UnreachableError",
        "UsageError",
        "WireError",
    ),
    "fusion.job.job": ("Job",),
    "fusion.job.nodepath": ("NodePath", "Rows", "Window"),
    "fusion.job.run": ("LocalRun", "Run", "attach"),
    "fusion.job.settings": ("SGD", "Adam", "AdamW", "Checkpoint", "Constant", "Cosine", "Linear", "tokens"),
    "fusion.job.tensordata": ("TensorData",),
    "fusion.job.tokendata": ("TextData", "TokenData"),
    "fusion.protocol.jobstatus": ("JobState", "JobStatus", "LogLine"),
    "fusion.protocol.metrics": ("StepMetrics",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adam",
    "AdamW",
    "AuthError",
    "CaptureError",
    "Checkpoint",
    "ConfigError",
    "Constant",
    "Cosine",
    "DataError",
    "FusionError",
    "GraphError",
    "Job",
    "JobError",
    "JobState",
    "JobStatus",
    "Linear",
    "LocalRun",
    "LogLine",
    "NodePath",
    "NotFoundError",
    "NumericError",
    "PlanError",
    "Rows",
    "Run",
    "SGD",
    "StateError",
    "StepMetrics",
    "TensorData",
    "TextData",
    "TokenData",
    "UnreachableError",
    "UsageError",
    "Window",
    "WireError",
    "__version__",
    "attach",
    "tokens",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'fusion' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
