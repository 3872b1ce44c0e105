"""Loading a job file: the owner's own script, run on the owner's own machine, which defines `job` or `make_job`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from fusion.base.errors import ConfigError, FusionError, UsageError

_MOST_BYTES = 10_000_000
MODULE_NAME = "fusion_job_file"


def load_job(path: Path, settings: dict[str, Any] | None = None) -> Any:
    """Run the file and return its job.

    A file defines `job = fusion.Job(...)`, or a function `make_job()` whose parameters, all with defaults, can be set
    by `settings`; with settings it is called even if there is a `job`. ConfigError, one line with file and line number,
    for whatever is wrong with it.
    """
    from fusion.job.job import Job

    module = _run(_checked(path))
    job, make = getattr(module, "job", None), getattr(module, "make_job", None)
    if settings and make is None:
        raise UsageError(f"job file {path}: --set needs a function make_job() with parameters; the file defines none")
    if make is not None and (settings or job is None):
        job = _make(path, make, settings or {})
    if not isinstance(job, Job):
        found = "defines neither" if job is None else f"has a job of type {type(job).__name__}, not"
        raise ConfigError(f"job file {path}: {found} 'job = fusion.Job(...)' nor a function make_job()")
    return job


def _checked(path: Path) -> Path:
    try:
        if path.is_dir():
            raise ConfigError(f"job file {path} is a directory; name a Python file")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(4096)
    except FileNotFoundError:
        raise ConfigError(f"job file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"job file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if size == 0:
        raise ConfigError(f"job file {path} is empty; it must define job = fusion.Job(...) or make_job()")
    if size > _MOST_BYTES or b"\0" in head:
        raise ConfigError(f"job file {path} ({size} bytes) is no Python source")
    return path.resolve()


def _run(path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_loader(MODULE_NAME, loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    sys.path.insert(0, str(path.parent))
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"job file {error.filename or path}{line}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise _told(path, error) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _make(path: Path, make: Any, settings: dict[str, Any]) -> Any:
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"job file {path}: make_job is not a function") from None
    for name in settings:
        if name not in known:
            raise UsageError(
                f"job file {path}: make_job has no parameter {name!r}; it has {', '.join(known) or 'none'}"
            )
    try:
        return make(**settings)
    except (Exception, SystemExit) as error:
        raise _told(path, error) from error


def _told(path: Path, error: BaseException) -> FusionError:
    """Return the error with the line of the job file that it came from; ours keep their kind and exit code."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    where = f"job file {path}" + (f", line {lines[-1]}" if lines else "")
    if isinstance(error, FusionError):
        return type(error)(f"{where}: {error}")
    return ConfigError(f"{where}: {type(error).__name__}: {error}")


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of `--set name=value`: true and false, integers, numbers, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set takes name=value, got {pair[:60]!r}")
        if name in settings:
            raise UsageError(f"--set names {name!r} twice")
        settings[name] = _value(value)
    return settings


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
