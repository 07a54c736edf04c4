"""DistributedDataParallel's reducer, where it keeps account of which parameters were used (`find_unused_parameters=True`,
`static_graph=True`).

It keeps that account, a few integers, on the host and on the parameters' device, and copies between the two through pinned
memory, whose allocator only a C++ extension can give a device. Told that both are on the host, it copies nothing, and the
members add their accounts up by gloo.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchax_core.tensor import active
from torchax_ops_c10d import p2p
from torchax_ops_c10d.members import has_processes

__all__ = ["install"]


def install() -> None:
    """Let DistributedDataParallel make reducers that keep their account on the host, for groups of the backend "jax"."""
    dist.Reducer = Reducer  # type: ignore[misc]


class _AccountOnHost(TorchDispatchMode):
    """The uninitialised int32 tensor that a reducer makes on device "jax" is made on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class Reducer(dist.Reducer):
    """torch's reducer, which makes its account at once or, for a static graph, when told that there is one."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Any,
        limits: Any,
        process_group: Any,
        *args: Any,
        **kw: Any,
    ) -> None:
        self._process_group = process_group if params[0].device.type == "jax" and has_processes(process_group) else None
        with _AccountOnHost():
            super().__init__(params, bucket_indices, limits, process_group, *args, **kw)
        find_unused = kw.get("find_unused_parameters", args[2] if len(args) > 2 else False)
        if find_unused and self._process_group is not None:
            _let_hosts_talk(self._process_group)

    def _rebuild_buckets(self) -> bool:
        """Where a function is traced, too, the members tell each other now in what order gradients came."""
        suspended = getattr(active.trace, "suspended", contextlib.nullcontext)
        with suspended():
            return bool(super()._rebuild_buckets())  # type: ignore[misc]

    def _set_static_graph(self) -> None:
        with _AccountOnHost():
            super()._set_static_graph()  # type: ignore[misc]
        if self._process_group is not None:
            _let_hosts_talk(self._process_group)


def _let_hosts_talk(group: Any) -> None:
    """Give a group gloo for tensors on the CPU, if nothing serves them there."""
    cpu = torch.device("cpu")
    if cpu not in group._device_types:
        name, description = group.group_name, group.group_desc
        group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, p2p.host_of(name))
        group._set_group_name(name)  # a group is known by what one of its backends is called
        group._set_group_desc(description)
