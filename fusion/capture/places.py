"""Where in the user's model something happened: its module path and its own source line."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary
from types import FrameType, TracebackType

import torch
from torch import fx, nn
from torch.fx.proxy import TracerBase

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_REPEATED_CALL = re.compile(r"@\d+$")
_OWN = str(Path(__file__).parent)
_STEP = str(Path(__file__).with_name("entry.py"))
_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_SITE_PACKAGES = "site-packages"


@dataclass(frozen=True, slots=True)
class Place:
    """A spot in the user's model."""

    module_path: str = ""  #: "blocks.3.attn"; "" for the model itself and for the loss function
    source: str = ""  #: "gpt.py:41"; "" when unknown

    def __str__(self) -> str:
        name = f"module {self.module_path!r}" if self.module_path else "the model"
        return f"{name} ({self.source})" if self.source else name


def place_of_node(node: fx.Node, prefix: str) -> Place:
    """Return where the model made `node`; `prefix` is the name of the model inside the exported module."""
    return Place(module_path_of_node(node, prefix), _source_of_node(node))


def module_path_of_node(node: fx.Node, prefix: str) -> str:
    """Return the path of the innermost module that made `node`, as the user's own model names it."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(stack.values()):
        plain = _REPEATED_CALL.sub("", path)
        if plain == prefix:
            return ""
        if plain.startswith(prefix + "."):
            return plain[len(prefix) + 1 :]
    return ""


def place_of_error(error: BaseException, model: nn.Module) -> Place:
    """Return the innermost line of the user's own code, and the innermost module of `model`, that raised `error`."""
    names = {id(module): name for name, module in model.named_modules()}
    path: str | None = None
    source = ""
    for frame, line in _frames_inside_out(error.__traceback__):
        file = frame.f_code.co_filename
        if not source and _is_users(file):
            source = _shown(file, line)
        if path is None:
            path = names.get(id(frame.f_locals.get("self")))
    return Place(path or "", source)


def _frames_inside_out(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    yield from reversed(frames)


def came_through(error: BaseException, folder: str) -> bool:
    """Whether `error` was raised inside the given folder of torch."""
    return any(
        frame.f_code.co_filename.startswith(f"{_TORCH}/{folder}/")
        for frame, _ in _frames_inside_out(error.__traceback__)
    )


@contextmanager
def readable_places() -> Iterator[None]:
    """Make torch note every line of the user's code on a node, not only those in functions called "forward".

    Where torch has no such method, its own choice of lines stays.
    """
    original = getattr(TracerBase, "_filter_traceback_frames", None)
    if original is None:
        yield
        return
    TracerBase._filter_traceback_frames = _users_frames  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = original  # type: ignore[method-assign]


def _users_frames(_: TracerBase, stack: StackSummary) -> StackSummary:
    """Keep the frames inside the step that is captured which are the user's own."""
    first = max((index for index, frame in enumerate(stack) if frame.filename == _STEP), default=0)
    return StackSummary.from_list([frame for frame in stack[first:] if _is_users(frame.filename)])


def _source_of_node(node: fx.Node) -> str:
    users = [(file, line) for file, line in _FRAME.findall(node.stack_trace or "") if _is_users(file)]
    return _shown(users[-1][0], int(users[-1][1])) if users else ""


def _is_users(file: str) -> bool:
    if file.startswith((_OWN, _TORCH, "<", "torch/")):
        return False
    return _SITE_PACKAGES in file or not file.startswith(_STANDARD_LIBRARY)


def _shown(file: str, line: int) -> str:
    """Shorten a file's path: relative to the working directory or to site-packages where it lies in one."""
    path = Path(file)
    if _SITE_PACKAGES in path.parts:
        parts = path.parts
        path = Path(*parts[parts.index(_SITE_PACKAGES) + 1 :])
    elif path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
