"""torch.amp.GradScaler inside a trace: whether a step is skipped is decided on the device.

Its `step` asks for a value, whether any gradient is infinite or NaN. While a function is traced the optimizer's step is
computed in any case, and parameters and state then keep what they held where the gradients were not finite.
Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree

from torchax_core.optimizers import make_state
from torchax_core.shared_patches import SharedPatches, patch
from torchax_core.tensor import Tensor, active

__all__ = ["tracing_scalers"]

_original: Any = GradScaler._maybe_opt_step


@SharedPatches
def tracing_scalers(stack: contextlib.ExitStack) -> None:
    """Let scalers in traces of any thread decide on the device; those of other threads go straight on."""
    patch(stack, GradScaler, "_maybe_opt_step", _maybe_step)


def _maybe_step(self: GradScaler, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    found = [f for f in optimizer_state["found_inf_per_device"].values() if isinstance(f, Tensor)]
    if active.trace is None or not found:
        return _original(self, optimizer, optimizer_state, *args, **kwargs)
    skipped = torch.stack([f.reshape(()) for f in found]).sum() > 0
    make_state(optimizer, active.trace)
    with torch.no_grad():
        before = {id(t): (t, t._store.array, t.clone()) for t in _tensors_of(optimizer)}
        result = optimizer.step(*args, **kwargs)
        chosen: dict[Any, Any] = {}  # one for all step counts that are one (shared_counts.py)
        for tensor in _tensors_of(optimizer):
            # state that the step itself has made starts from nothing
            _, was, old = before.get(id(tensor), (tensor, tensor, torch.zeros_like(tensor)))
            now = tensor._store.array
            key = (id(was), id(now)) if tensor.__class__ is Tensor else id(tensor)
            if key not in chosen:
                chosen[key] = (now, torch.where(skipped, old, tensor))
            tensor.copy_(chosen[key][1])
    return result


def _tensors_of(optimizer: Any) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [t for t in pytree.tree_leaves([parameters, [*optimizer.state.values()]]) if isinstance(t, Tensor)]
