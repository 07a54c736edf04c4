"""torch.autocast("jax", dtype=...): packs state policies (OpSet.autocast), this puts them on torch's AutocastPrivateUse1 key.

The kernel there casts the arguments, leaves the key out, and calls the op again: above autograd, so gradients come back in
the parameters' own dtype. Ops without a policy fall through.
Source: https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.opset import AutocastRule
from torchax_core.tensor import DEVICE_TYPE
from torchax_core.variants import find_op

__all__ = ["install"]

_libraries: dict[str, Any] = {}
_installed: set[str] = set()
_lock = threading.Lock()
_fallthrough: Any = None


def install(environment: Any) -> None:
    """Put in force the autocast rules of the environment's packs; those already in force stay."""
    global _fallthrough
    with _lock:
        if _fallthrough is None:
            _fallthrough = torch.library.Library("_", "IMPL")  # noqa: TOR901
            _fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for pack in environment.packs:
            environment._table.host.definitions(pack, environment.config)
            for op_set in pack.sets or ():
                for rule in op_set.autocast_rules:
                    _install_rule(rule)


def _install_rule(rule: AutocastRule) -> None:
    func = find_op(rule.op)
    if func is None or rule.op in _installed:
        return
    namespace, _, name = rule.op.partition("::")
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # noqa: TOR901
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    policy = rule.policy

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            dtype = _target(policy, args, kwargs)
            if dtype is not None:
                args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), (args, kwargs))
            return func(*args, **kwargs)

    library.impl(name, autocast, "AutocastPrivateUse1")
    _installed.add(rule.op)


def _target(policy: str, args: Any, kwargs: Any) -> torch.dtype | None:
    if policy == "lower_precision_fp":
        return torch.get_autocast_dtype(DEVICE_TYPE)
    if policy == "fp32":
        return torch.float32
    dtypes = [t.dtype for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and _is_eligible(t)]
    if not dtypes:
        return None
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As torch: floating tensors are cast, float64 and everything else stays."""
    if _is_eligible(tensor) and tensor.dtype is not torch.float64 and tensor.dtype is not dtype:
        return tensor.to(dtype)
    return tensor


def _is_eligible(tensor: torch.Tensor) -> bool:
    """Floating, and on the device: ours, or what stands for ours while a graph is made."""
    return tensor.device.type == DEVICE_TYPE and tensor.is_floating_point()
