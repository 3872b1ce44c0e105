"""The one tree of errors, each family with the exit code of the command that it ends.

FusionError
├── UsageError            2   a command line or a call that makes no sense
├── ConfigError          10   a setting, a job, a file or a model that cannot be used as it is
│   ├── CaptureError          the model cannot be captured as a graph of operators
│   ├── GraphError            a graph that is malformed or holds what is not allowed
│   └── DataError             the data set is missing, empty, of the wrong type or out of range
├── AuthError            20   no, expired, revoked or foreign credentials; or a role that may not do this
├── UnreachableError     30   the other side does not answer
├── JobError             40   the job failed or was cancelled
│   ├── NotFoundError         no such job, node or blob
│   ├── StateError            not possible in the present state (already finished, stale epoch, ...)
│   ├── StoppedError          ended because somebody asked for it
│   └── NumericError          the loss or the gradients are not finite
├── PlanError            50   no plan fits the cluster
└── WireError            60   bytes from another process that break the protocol

Every message is one line: which field, what it was, what is allowed, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class FusionError(Exception):
    """The root: every error that a user of this package should ever have to catch."""

    exit_code: ClassVar[int] = 1


class UsageError(FusionError):
    """A command line or a call that makes no sense."""

    exit_code = 2


class ConfigError(FusionError):
    """A setting, a job, a file or a model that cannot be used as it is."""

    exit_code = 10


class CaptureError(ConfigError):
    """The model cannot be captured as a graph of operators; names the operator or the model's line."""


class GraphError(ConfigError):
    """A graph that is malformed, or that holds an operator or a size which is not allowed."""


class DataError(ConfigError):
    """The data set is missing, empty, of the wrong type or out of range."""


class AuthError(FusionError):
    """No, expired, revoked or foreign credentials, or a role that may not do this."""

    exit_code = 20


class UnreachableError(FusionError):
    """The other side does not answer within the deadline."""

    exit_code = 30


class JobError(FusionError):
    """The job failed or was cancelled."""

    exit_code = 40


class NotFoundError(JobError):
    """No such job, node or blob."""


class StateError(JobError):
    """Not possible in the present state, for example a message of an older epoch."""


class StoppedError(JobError):
    """Ended because somebody asked for it; the message is the reason."""


class NumericError(JobError):
    """The loss or the gradients are not finite and the job does not tolerate it."""


class PlanError(FusionError):
    """No plan fits the cluster; the message says what is missing."""

    exit_code = 50


class WireError(FusionError):
    """Bytes from another process that break the protocol. Nothing was changed by them."""

    exit_code = 60
