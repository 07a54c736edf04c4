"""Data parallel training by hand, where DistributedDataParallel is not to wrap the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchax_ops_c10d.members import members_of

__all__ = ["average_gradients", "broadcast_parameters"]


def average_gradients(module: torch.nn.Module | Iterable[torch.Tensor], group: Any = None) -> None:
    """After `loss.backward()`: every gradient becomes its mean over the members, in one collective for each dtype.

    module: a module, or its parameters: the same on all members. A parameter that has a gradient on some members only
            counts as zero on the others; one that has it on none keeps none.
    group:  a process group; default: the default one. Works between processes, and inside jax.shard_map.
    """
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else module
    trained = [p for p in parameters if p.requires_grad]
    members = members_of("average_gradients", group or dist.group.WORLD)
    if members.rank is None:  # one program: a gradient that is missing is missing everywhere
        trained = [p for p in trained if p.grad is not None]
    missing = {id(p) for p in trained if p.grad is None}

    def average(some: list[torch.Tensor]) -> None:
        # behind the gradients, for each parameter: how many members have one
        marks = torch.tensor([float(id(p) not in missing) for p in some]).to(some[0])
        values = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
        *means, counts = _joined([*values, marks], lambda flat: dist.all_reduce(flat, dist.ReduceOp.AVG, group))
        had = counts.tolist() if missing.intersection(map(id, some)) else [1.0] * len(some)
        for parameter, mean, count in zip(some, means, had, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif count:
                parameter.grad = mean.clone()

    _by_dtype(trained, average)


def broadcast_parameters(module: torch.nn.Module, source: int = 0, group: Any = None) -> None:
    """Before training: every parameter and buffer becomes that of the rank `source`.

    source: a rank of the default group, as in torch.distributed.broadcast.
    """

    def broadcast(some: list[torch.Tensor]) -> None:
        values = _joined(some, lambda flat: dist.broadcast(flat, source, group))
        for tensor, value in zip(some, values, strict=True):
            tensor.copy_(value)

    _by_dtype([*module.parameters(), *module.buffers()], broadcast)


def _joined(tensors: list[torch.Tensor], collective: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """The tensors after a collective, in place, on all of them as one."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    collective(flat)
    return [part.view_as(t) for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True)]


def _by_dtype(tensors: list[torch.Tensor], function: Callable[[list[torch.Tensor]], None]) -> None:
    with torch.no_grad():
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            function([t for t in tensors if t.dtype == dtype])
