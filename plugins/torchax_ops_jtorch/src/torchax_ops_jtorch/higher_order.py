"""torch's higher-order operator `flex_attention`, made known to run on device "jax".

It takes torch code among its arguments, so that no schema describes it and no OpSet can hold it: it has rules by tensor
type, which these are. Its Python front refuses devices by name; that check lets "jax" pass while this pack is in use.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.nn.attention import _utils

from torchax_core import Tensor, View, current_env

__all__ = ["register"]

_FRONT = "torch.nn.attention.flex_attention"
_Key = torch._C.DispatchKey
_NAME = "jtorch"


def register() -> None:
    """Give the operator its rules. Once a process; to do it again changes nothing."""
    if Tensor in flex_attention.python_key_table:
        return
    for kind in (Tensor, View):
        flex_attention.py_impl(kind)(_attend)
        flex_attention_backward.py_impl(kind)(_attend_backward)
    recorded = flex_attention.py_kernels.pop(_Key.Autograd)

    # torch's own rule captures a graph of the backward first; ours is differentiable as it is.
    @flex_attention.py_impl(_Key.Autograd)
    def differentiable(query: Any, *args: Any, **kwargs: Any) -> Any:
        return (_attend if isinstance(query, Tensor) else recorded)(query, *args, **kwargs)

    @flex_attention.py_impl(_Key.AutocastPrivateUse1)
    def cast(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("jax")
        lower = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_Key.AutocastPrivateUse1)):
            return flex_attention(*lower, *args, **kwargs)

    _let_pass()


def _attend(*args: Any, **kwargs: Any) -> Any:
    from torchax_ops_jtorch.flex import attend

    return attend(*args, **kwargs)


def _attend_backward(*args: Any, **kwargs: Any) -> Any:
    from torchax_ops_jtorch.flex import attend_backward

    return attend_backward(*args, **kwargs)


def _let_pass() -> None:
    """Let the front's check of devices know this one. Importing the front takes most of a second, so where nobody has, its
    first call is waited for: it checks its arguments by a function of a small module before it checks devices."""
    if _FRONT in sys.modules:
        _replace_check()
        return
    check = getattr(_utils, "_validate_sdpa_input", None)
    if check is None:  # another version of torch: its front keeps refusing
        return

    @functools.wraps(check)
    def first_call(*args: Any, **kwargs: Any) -> Any:
        if _FRONT in sys.modules:
            _replace_check()
        return check(*args, **kwargs)

    _utils._validate_sdpa_input = first_call


def _replace_check() -> None:
    front = sys.modules[_FRONT]
    check: Callable[..., None] = front._validate_device
    if getattr(check, "_torchax", False):
        return

    @functools.wraps(check)
    def known(query: Any, key: Any, value: Any) -> None:
        if query.device.type != "jax" or all(pack.name != _NAME for pack in current_env().packs):
            check(query, key, value)

    known._torchax = True  # type: ignore[attr-defined]
    front._validate_device = known  # type: ignore[attr-defined]
