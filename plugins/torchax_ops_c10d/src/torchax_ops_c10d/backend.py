"""The backend "jax" of torch.distributed: `torch.distributed.init_process_group("jax")`.

The members of its groups are

- processes, under jax.distributed, which is initialised if it was not (init_process_group with env:// or tcp://);
- or the devices of this process, if the group's store is one that no other process can see (`init_single_process`): what
  code in jax.shard_map takes part in;
- or this process, alone.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import jax
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from torchax_core import spanning
from torchax_ops_c10d import batch_norm, members, p2p, reducer
from torchax_ops_c10d.groups import CollectiveError, backend_of, unboxed

__all__ = ["factor_of", "init_single_process", "register"]


def register() -> None:
    """Make the backend "jax" known to torch.distributed. Called by torch, which finds it through its entry point."""
    known = dist.Backend._plugins.get("JAX")
    if known is None or known.creator_fn is not _create:  # torch before 2.14 knows the name from torchax-core
        dist.Backend.register_backend("jax", _create, extended_api=True, devices=["jax"])


def init_single_process(world_size: int | None = None, *, timeout: timedelta | None = None) -> None:
    """torch.distributed.init_process_group for one process whose devices are the members.

    world_size: how many; default: jax.device_count(). This process is rank 0, as whose program all devices run.
    Collectives of its groups run inside jax.shard_map (see torchax_ops_c10d.map_group).
    """
    register()
    size = jax.device_count() if world_size is None else world_size
    dist.init_process_group("jax", store=dist.HashStore(), rank=0, world_size=size, timeout=timeout)


def _create(options: Any, _: Any) -> Any:
    """What torch.distributed keeps for a group, made by every member of it."""
    backend = _backend(options.group_rank, options.group_size, options.group_id)
    found = _members(options)
    if found is not None:
        members.register(options.group_id, backend, found)
        reducer.install()
        batch_norm.install()
        if found.size > 1:
            p2p.connect(options)
    return backend


def _members(options: Any) -> members.Members | None:
    if options.group_size == 1:
        return members.OneMember()
    if isinstance(_innermost(options.store), dist.HashStore) or "Fake" in type(_innermost(options.store)).__name__:
        return None
    if not options.global_ranks_in_group:  # the default group, the first
        _start_jax(options)
    elif not jax.distributed.is_initialized():
        raise CollectiveError(
            "new_group(backend='jax'): jax.distributed is not initialised. Make the default group of the backend 'jax' too, with "
            "init_process_group('cpu:gloo,jax:jax'), or call jax.distributed.initialize at the program's start."
        )
    options.store.set(f"process of {options.group_rank}", str(jax.process_index()))
    processes = [int(options.store.get(f"process of {rank}")) for rank in range(options.group_size)]
    if len(set(processes)) != len(processes):
        raise CollectiveError(
            f"init_process_group('jax'): each rank must be a process of its own of jax.distributed, but ranks 0 to "
            f"{len(processes) - 1} are the processes {processes}, of {jax.process_count()}."
        )
    devices = [min(jax.local_devices(p), key=lambda d: d.id) for p in processes]
    spanning.register(spanning.Group(devices, options.group_rank, options.store))
    return members.ProcessMembers(devices, options.group_rank)


def _start_jax(options: Any) -> None:
    """jax.distributed.initialize, if it was not called. Rank 0 picks the coordinator's port."""
    if jax.distributed.is_initialized():
        return
    if options.group_rank == 0:
        options.store.set("coordinator", f"{_host(options.store)}:{_free_port()}")
    coordinator = options.store.get("coordinator").decode()
    local = os.environ.get("LOCAL_RANK")
    try:
        jax.distributed.initialize(
            coordinator,
            options.group_size,
            options.group_rank,
            local_device_ids=None if local is None else [int(local)],
            initialization_timeout=max(1, int(options.timeout.total_seconds())),
        )
    except RuntimeError as error:
        raise CollectiveError(
            "init_process_group('jax') starts jax.distributed, which must come before the first use of any device. Call it at "
            f"the program's start, before tensors are made on device 'jax'. (jax: {error})"
        ) from error


def _host(store: Any) -> str:
    """Where other processes reach rank 0, as far as it was said."""
    said = os.environ.get("MASTER_ADDR") or getattr(_innermost(store), "host", None)
    return str(said or socket.gethostname())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


# -- the object torch keeps ----------------------------------------------------------------------
#
# Collectives of tensors on device "jax" are ops (ops.py) and never reach it.


class _Answer:
    """Whether a backend can do something: torch's python code tests an attribute, its C++ code calls it."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def __call__(self) -> bool:
        return self.answer


class _Backend(_distributed_c10d.Backend):
    # what torch's base class says of these asks this class again
    supports_splitting: Any = _Answer(False)
    supports_shrinking: Any = _Answer(False)
    supports_window: Any = _Answer(False)
    supports_time_estimate: Any = _Answer(False)
    supports_reconfigure: Any = _Answer(False)
    supports_coalescing: Any = _Answer(False)

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self.group = name
        self.factor: float | None = None

    def getBackendName(self) -> str:  # torch's name for it
        return "jax"

    def name(self) -> str:
        return "jax"

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        """See factor_of."""
        self.factor = float(options.reduceOp.factor)

    def shutdown(self) -> None:
        """torch.distributed.destroy_process_group. jax.distributed stays up: arrays live on its devices."""
        p2p.disconnect(self.group)


def _backend(rank: int, size: int, name: str) -> Any:
    try:
        return _Backend(rank, size, name)
    except TypeError:  # before torch 2.14, python cannot make one
        return _distributed_c10d.FakeProcessGroup._create_internal(rank, size)  # type: ignore[attr-defined]


def factor_of(reduce_op: Any, group: Any) -> float | None:
    """The factor of a PREMUL_SUM that an op was given as a torch.ScriptObject, which hides it; None if it cannot be told.

    torch's own kernel of any reduction hands the backend a ReduceOp that python can read: run it, on no tensors.
    """
    backend = backend_of(unboxed(group))
    if not isinstance(backend, _Backend):
        return None
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    torch.ops.c10d.allreduce_.default.redispatch(keys, [], group, reduce_op, None)
    return backend.factor
