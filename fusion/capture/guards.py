"""What torch.export would drop, freeze or differentiate wrongly without a word: refused, or made explicit.

All of it holds only while the model's own forward runs under capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointFunction

from fusion.base.errors import CaptureError

_WRAPPED_IN = {
    "OptimizedModule": "the model before torch.compile",
    "DataParallel": "model.module",
    "DistributedDataParallel": "model.module",
    "FullyShardedDataParallel": "the model before it is sharded",
}


class NotCapturableError(Exception):
    """Something in the model's own code that a graph cannot hold: what it does, and what to do instead."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


def check_modules(model: nn.Module) -> None:
    """Raise CaptureError if `model` is wrapped by another tool, or a module in it has a backward hook."""
    for wrapper, inside in _WRAPPED_IN.items():
        if type(model).__name__ == wrapper:
            raise CaptureError(f"model: it is wrapped in {wrapper}; hand over the module inside ({inside})")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {path!r}: it is compiled by TorchScript; use the nn.Module that it was made from"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"module {path!r}: it has a backward hook, which a graph cannot hold; remove the hook")


@contextmanager
def guarded() -> Iterator[None]:
    """Inside the block, calls raise NotCapturableError if the captured graph would not do what they do."""
    hook = register_module_buffer_registration_hook(_assign_in_place)  # type: ignore[arg-type]
    original = Function.__dict__["apply"]
    Function.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
    try:
        with _Refusals():
            yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
        hook.remove()


class _Refusals(TorchFunctionMode):
    """Looks at every call of PyTorch's Python interface."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise NotCapturableError(
                "it registers a hook on a tensor's gradient, which a graph cannot hold",
                "remove the hook, or compute its effect in forward",
            )
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise NotCapturableError(
                "it runs a backward pass inside forward, which a graph cannot hold",
                "keep forward to the forward pass",
            )
        if any(_is_stray(item) for item in tree_iter((args, kwargs))):
            raise NotCapturableError(
                "it uses a tensor with requires_grad=True that is not among its parameters (kept in a list, in a plain "
                "attribute, or by the loss function), so it would not be trained",
                "make it an nn.Parameter of a module (nn.ParameterList for a list), or detach it",
            )
        return func(*args, **(kwargs or {}))


def _is_stray(item: Any) -> bool:
    """Whether `item` is a real tensor that wants gradients: the model's own parameters are fake here."""
    if not isinstance(item, Tensor) or isinstance(item, FakeTensor) or is_functorch_wrapped_tensor(item):
        return False
    return item.requires_grad


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Stand in for torch.autograd.Function.apply: export would differentiate its forward and forget its backward."""
    if cls is CheckpointFunction:
        run: Callable[..., Any] = args[0]
        return run(*args[2:])  # a re-entrant checkpoint: (function, preserve_rng_state, *arguments)
    raise NotCapturableError(
        f"it uses {cls.__name__}, a torch.autograd.Function, whose own backward a graph cannot hold",
        "write it with PyTorch operators, for example x + (f(x) - x).detach() for a straight-through estimate",
    )


def _assign_in_place(module: nn.Module, name: str, new: Tensor | None) -> Tensor | None:
    """Turn the assignment of a buffer into a change of its memory: export forgets assignments in submodules."""
    old = module._buffers.get(name)
    if old is None or new is None or new is old:
        return new
    if new.shape != old.shape or new.dtype != old.dtype:
        raise NotCapturableError(
            f"it assigns a tensor of another shape or dtype to the buffer {name!r}",
            "keep the buffer's shape and dtype",
        )
    if new.requires_grad:
        raise NotCapturableError(
            f"it assigns a tensor that carries gradients to the buffer {name!r}",
            "detach it (.detach()) or compute it under torch.no_grad()",
        )
    return old.copy_(new)
