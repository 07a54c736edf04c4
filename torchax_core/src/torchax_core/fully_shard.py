"""torch.distributed.fsdp.fully_shard inside a trace, unmodified: its hooks, which gather weights and scatter gradients, are
Python that runs while the function is traced, and what they send is part of the program.

A program begins and ends with all weights sharded: what a forward has left gathered, for a backward that has not come, is given
back before each call, and at the function's end.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch

from torchax_core.errors import CollectiveError
from torchax_core.shared_patches import SharedPatches, patch
from torchax_core.tensor import active
from torchax_core.trace import Again, get_grad

__all__ = ["tracing_fully_shard"]

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


@SharedPatches
def tracing_fully_shard(stack: contextlib.ExitStack) -> None:
    """Watch the forwards of sharded modules while a trace is under way."""
    if _STATE not in sys.modules:
        return
    kind: Any = sys.modules[_STATE].FSDPState
    lazy_init = kind._lazy_init

    def begin(root: Any) -> None:
        """The forward of a sharded module begins."""
        trace = active.trace
        if trace is None:
            return lazy_init(root)
        if root._is_root is None:
            with trace.suspended():  # it may lay out the weights anew, for good
                lazy_init(root)
        if not root._is_root or id(root) in trace.endings:
            return
        _check(root)
        if any(not group.is_sharded for group in _groups(root)):
            raise Again(functools.partial(_begin_anew, root))
        trace.torch_only.add("a module sharded by fully_shard")
        trace.beginnings.append(functools.partial(_shard, root))
        trace.endings[id(root)] = functools.partial(_end, root)
        trace.guards.append(("gradients that were not reduced", functools.partial(_has_unreduced, root), False))

    patch(stack, kind, "_lazy_init", begin)


def _groups(root: Any) -> list[Any]:
    found: list[Any] = []
    for state in root._state_ctx.all_states:
        one = getattr(state, "_fsdp_param_group", None)  # before torch had several
        found += getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
    return found


def _shard(root: Any) -> None:
    """Give back what is gathered."""
    with torch.no_grad():
        for group in _groups(root):
            if not group.is_sharded:
                group.reshard()


def _begin_anew(root: Any) -> None:
    """As `_shard`, after the root's forward has begun and was left."""
    root._training_state = type(root._training_state).IDLE
    _shard(root)


def _end(root: Any) -> None:
    """The function ends: nothing is gathered any more, and no gradients are kept."""
    _check(root)
    _shard(root)


def _check(root: Any) -> None:
    if _has_unreduced(root):
        raise CollectiveError(
            "fully_shard: gradients that set_requires_gradient_sync(False) keeps from being reduced cannot stay from one call of "
            "a jitted function to the next. Put all of a step's backwards into one function, the last of them with True."
        )


def _has_unreduced(root: Any) -> bool:
    """Whether a group keeps gradients of its whole weights, or partial sums of them."""
    return any(
        group._partial_reduce_output is not None
        or any(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and get_grad(param._unsharded_param) is not None)
            for param in group.fsdp_params
        )
        for group in _groups(root)
    )
