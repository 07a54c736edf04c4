"""Modules that move to the device and back: their parameters stay the objects they are, as on every device of torch's own.

`Module.to` gives a parameter new data by `p.data = ...` where old and new are of one kind, and exchanges two tensor objects
where they are not, which for wrapper subclasses is always. The exchange is refused while anything else knows the parameter
(a graph, a view, a weak reference), and leaves hooks and attributes behind. So torch's two questions on the way, whether the
kinds fit and how to exchange, are answered here for tensors of ours; all others go to torch.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch
import torch.nn.utils.parametrize as parametrize
from torch.nn.parameter import Parameter, is_lazy

from torchax_core.lazy import LazyParameter
from torchax_core.tensor import DEVICE_TYPE, INTERNAL, Tensor, become

__all__ = ["become_any", "keep_parameters"]

_APPLY = torch.nn.Module._apply.__code__
_BY_MODULES = (_APPLY, parametrize._maybe_set.__code__)
"""Who exchanges two tensors only to give the first what the second holds."""


def keep_parameters(library: torch.library.Library) -> None:
    """Let parameters stay themselves in `Module.to`. Once per process; `library` holds on to the kernel."""
    exchange = torch.utils.swap_tensors

    @functools.wraps(exchange)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if (isinstance(t1, Tensor) or isinstance(t2, Tensor)) and sys._getframe(1).f_code in _BY_MODULES:
            become_any(t1, t2)
        else:
            exchange(t1, t2)

    torch.utils.swap_tensors = swap_tensors
    library.impl("_has_compatible_shallow_copy_type", _fits, "AutogradPrivateUse1")


def _fits(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `self.data = other` will do. C++ asks too, in its own assignment, which is only for two of a kind."""
    if isinstance(self, Tensor) and not isinstance(other, Tensor):
        if is_lazy(self) or sys._getframe(1).f_code in _APPLY.co_consts:
            return _plain(other)
    return torch._C._dispatch_keys(self) == torch._C._dispatch_keys(other)  # C++'s own rule for this device


def _plain(x: torch.Tensor) -> bool:
    """Whether a parameter of ours can become what `x` is."""
    return type(x) in (torch.Tensor, Parameter) and x.device.type in ("cpu", "meta") and x.layout is torch.strided


def become_any(target: torch.Tensor, source: torch.Tensor) -> None:
    """What `target.data = source` does, where one of them may be of another device: `target` is the same object afterwards,
    with its hooks and attributes; it takes its gradient along.

    Raises RuntimeError for a target that is the result of an op: its graph is on its device.
    """
    lazy = is_lazy(target)
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        kind = target.__class__
        become(target, source)
        if lazy:
            target.__class__ = kind
        return
    if not isinstance(source, Tensor) and not _plain(source):
        raise RuntimeError(
            f"Attempted to set the data of a tensor on device {target.device} to a {type(source).__name__} on device "
            f"{source.device}; move it first, with `.to('jax')`."
        )
    if not target.is_leaf:
        raise RuntimeError(
            f"the result of an op, on device {target.device}, cannot become a tensor on device {source.device} in place. "
            f"Make it another: `x = x.to({str(source.device)!r})`."
        )
    gradient = None if lazy else target.grad
    requires_grad = target.requires_grad
    if gradient is not None:
        target.grad = None
    if requires_grad and not lazy and not target.is_inference():
        torch.autograd.graph.get_gradient_edge(target).node.register_prehook(_refuse)
    try:
        _exchange(target, source.detach().requires_grad_(requires_grad), lazy)
        if gradient is not None:
            become_any(gradient, gradient.detach().to(target.device))
    finally:
        if gradient is not None:
            target.grad = gradient


def _refuse(gradients: Any) -> NoReturn:
    raise RuntimeError(
        f"a backward reached a parameter that has been moved to or from device {DEVICE_TYPE!r} since the forward. Move a module "
        "before its forward, or after the backward."
    )


def _exchange(target: torch.Tensor, fresh: torch.Tensor, lazy: bool) -> None:
    """Give `target` what is inside of `fresh`, which nobody else knows, and the other way round."""
    hooks, after = target._backward_hooks, target._post_accumulate_grad_hooks
    old, new = target.__dict__, fresh.__dict__
    kinds = target.__class__, fresh.__class__
    users = {name: value for name, value in old.items() if name not in INTERNAL}
    parameter = isinstance(target, Parameter)
    if isinstance(fresh, Tensor):
        kind: Any = LazyParameter if lazy else kinds[1]
        if kinds[0] not in (torch.Tensor, Parameter) and not lazy:
            new = new | {"_kind": kinds[0]}
        new = new | ({"_is_param": True} if parameter else {})
    else:
        kind = old.get("_kind") or (Parameter if parameter else torch.Tensor)
        kind = torch.nn.parameter.UninitializedParameter if lazy else kind
    target.__class__, fresh.__class__ = kind, kinds[0]
    target.__dict__ = new | users
    fresh.__dict__ = {name: value for name, value in old.items() if name in INTERNAL}
    torch._C._swap_tensor_impl(target, fresh)
    if hooks is not None:
        target._backward_hooks = hooks
    if after is not None:
        target._post_accumulate_grad_hooks = after
