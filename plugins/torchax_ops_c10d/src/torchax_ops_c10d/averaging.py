"""Data parallel training: what DistributedDataParallel does, where torch's own cannot (see the README)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["average_gradients", "broadcast_parameters"]


def average_gradients(module: torch.nn.Module | Iterable[torch.Tensor], group: Any = None) -> None:
    """After `loss.backward()`: every gradient becomes its mean over the members, in one collective for each dtype.

    module: a module, or its parameters. The same ones must have gradients on all members: those without, and that require
            one, count as zero, and get the mean.
    group:  a process group; default: the default one.
    """
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else module
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _together(
        [p.grad for p in trained if p.grad is not None], lambda flat: dist.all_reduce(flat, dist.ReduceOp.AVG, group)
    )


def broadcast_parameters(module: torch.nn.Module, source: int = 0, group: Any = None) -> None:
    """Before training: every parameter and buffer becomes that of the rank `source`.

    source: a rank of the default group, as in torch.distributed.broadcast.
    """
    tensors = [*module.parameters(), *module.buffers()]
    _together(tensors, lambda flat: dist.broadcast(flat, source, group))


def _together(tensors: list[torch.Tensor], collective: Any) -> None:
    """A collective, in place, on tensors joined into one for each dtype."""
    with torch.no_grad():
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            some = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in some])
            collective(flat)
            for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                tensor.copy_(part.view_as(tensor))
