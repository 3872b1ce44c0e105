"""Our tree of errors as gRPC statuses, both ways. The status message is the line that the user reads."""

from __future__ import annotations

from typing import Any

import grpc

from fusion.base import errors
from fusion.base.errors import (
    AuthError,
    ConfigError,
    FusionError,
    JobError,
    NotFoundError,
    PlanError,
    StateError,
    UnreachableError,
    UsageError,
    WireError,
)

ERROR_KEY = "fusion-error"  #: trailing metadata: the class of the error, where the status alone would lose it
MAX_MESSAGE_CHARACTERS = 2000  #: metadata is limited to 8 kB

_STATUS_OF: tuple[tuple[type[FusionError], grpc.StatusCode], ...] = (  # the first that fits
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (JobError, grpc.StatusCode.ABORTED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (AuthError, grpc.StatusCode.UNAUTHENTICATED),
    (UnreachableError, grpc.StatusCode.UNAVAILABLE),
    (PlanError, grpc.StatusCode.FAILED_PRECONDITION),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (FusionError, grpc.StatusCode.UNKNOWN),
)

_ERROR_OF: dict[grpc.StatusCode, type[FusionError]] = {
    grpc.StatusCode.UNAVAILABLE: UnreachableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnreachableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnreachableError,
    grpc.StatusCode.UNAUTHENTICATED: AuthError,
    grpc.StatusCode.PERMISSION_DENIED: AuthError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.ALREADY_EXISTS: StateError,
    grpc.StatusCode.ABORTED: JobError,
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.OUT_OF_RANGE: ConfigError,
    grpc.StatusCode.DATA_LOSS: WireError,
    grpc.StatusCode.UNIMPLEMENTED: WireError,
}

_CLASSES: dict[str, type[FusionError]] = {
    name: item for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, FusionError)
}


class RefusalError(FusionError):
    """An error that goes out with a status of its own instead of its class's."""

    def __init__(self, code: grpc.StatusCode, error: FusionError) -> None:
        super().__init__(str(error))
        self.code, self.error = code, error


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return the status and the one line with which `error` leaves a server; INTERNAL for what is not ours."""
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARACTERS]
    if isinstance(error, RefusalError):
        return error.code, message
    for kind, code in _STATUS_OF:
        if isinstance(error, kind):
            return code, message
    return grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}; see the log of the other side"


def error_metadata(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that `from_rpc_error` reads the class of `error` from."""
    source = error.error if isinstance(error, RefusalError) else error
    return ((ERROR_KEY, type(source).__name__),) if type(source).__name__ in _CLASSES else ()


def from_rpc_error(error: grpc.RpcError, what: str) -> FusionError:
    """Return the error of our tree that a failed call stands for.

    `what` tells what was tried, such as "submitting the job to 10.0.0.1:7443"; it goes in front where the other side
    gave no line of its own.
    """
    code: Any = error.code() if hasattr(error, "code") else None
    details = " ".join(str(error.details() if hasattr(error, "details") else error).split())
    stated = _stated_class(error)
    if stated is not None:
        return stated(details)
    kind = _ERROR_OF.get(code, FusionError)
    if kind is UnreachableError:
        return UnreachableError(f"{what}: no answer ({_reason(code, details)})")
    name = code.name if isinstance(code, grpc.StatusCode) else "unknown status"
    return kind(f"{what}: {details or name}")


def _reason(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it took too long"
    return details or code.name


def _stated_class(error: grpc.RpcError) -> type[FusionError] | None:
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == ERROR_KEY:
            return _CLASSES.get(value if isinstance(value, str) else value.decode())
    return None
