"""Who takes part in a collective: positions along a mesh axis, processes, or one.

members_of(op, group)    finds out which;
members.run(f, x, ...)   runs one of spmd.py's functions among them, on this member's array.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax_core import collective_order, spanning
from torchax_core.tensor import active
from torchax_ops_c10d import groups
from torchax_ops_c10d.groups import CollectiveError
from torchax_ops_c10d.spmd import Axis

__all__ = ["AxisMembers", "Members", "OneMember", "ProcessMembers", "has_processes", "members_of", "register", "wide"]


def wide() -> Any:
    """A context in which 64-bit arrays stay so: with jax's 64-bit types off, as they are by default, some functions and moves
    between devices make 32-bit ones of them."""
    return jax.enable_x64(True)


class Members:
    """The members of a group. size: how many; rank: which of them this is, None where each runs the same program."""

    size: int = 1
    rank: int | None = 0

    @property
    def traced(self) -> bool:
        """Whether what they run becomes part of a jitted function, where arrays have no values yet."""
        return self.rank is None

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """What each process tells the others while a jitted function is traced."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], arrays: Any, **static: Any) -> Any:
        """`function(arrays, axis=..., **static)` on every member.

        arrays: one, or a list; between processes the function gets scalars as (1,), and its own come back so.
        """
        raise NotImplementedError


class OneMember(Members):
    """A group of one."""

    def run(self, function: Callable[..., Any], arrays: Any, **static: Any) -> Any:
        with wide():
            return function(arrays, axis=None, **static)


class AxisMembers(Members):
    """The positions along a mesh axis of the jax.shard_map around: one program, run by all."""

    rank = None

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.size = int(jax.lax.axis_size(axis))

    def run(self, function: Callable[..., Any], arrays: Any, **static: Any) -> Any:
        with wide():
            return function(arrays, axis=self.axis, **static)


class ProcessMembers(Members):
    """Processes under jax.distributed, each with an array of its own on one of its devices.

    devices: one of each process, in the order of ranks.
    """

    def __init__(self, devices: list[Any], rank: int) -> None:
        self.size = len(devices)
        self.rank = rank
        self.devices = tuple(devices)
        self.device = devices[rank]
        self._sharding = NamedSharding(Mesh(np.array(devices), ("members",)), PartitionSpec("members"))
        self._programs: dict[Any, Callable[..., Any]] = {}

    @property
    def traced(self) -> bool:
        return active.trace is not None

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        return [json.loads(said) for said in spanning.group_of(self.devices).tell(json.dumps([*values]))]

    def run(self, function: Callable[..., Any], arrays: Any, **static: Any) -> Any:
        if active.trace is not None:
            with wide():
                return spanning.join(
                    self.devices,
                    function.__name__,
                    lambda arrays, axes: function(arrays, axis=axes, **static),
                    arrays,
                )
        spanning.group_of(self.devices).meet()
        key = (function, *sorted(static.items()))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._program(function, static)
        with wide():
            whole = jax.tree.map(self._whole, arrays)
            results = collective_order.in_turn(self.device, lambda: program(whole))
            return jax.tree.map(lambda array: array.addressable_data(0), results)

    def _program(self, function: Callable[..., Any], static: dict[str, Any]) -> Callable[..., Any]:
        def member(arrays: Any) -> Any:
            results = function(arrays, axis="members", **static)
            return jax.tree.map(lambda x: x.reshape(1) if x.ndim == 0 else x, results), collective_order.end()

        mesh, spec = self._sharding.mesh, self._sharding.spec
        return jax.jit(
            jax.shard_map(member, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()), check_vma=False)
        )

    def _whole(self, array: Any) -> jax.Array:
        """This member's array as its shard of one that all processes hold together."""
        if isinstance(array, jax.core.Tracer):
            raise CollectiveError(
                "a collective between processes cannot be part of a program of jax's own jit, grad or vmap, which is this "
                "process's own. Use torchax_core.jit, call it outside, or run one program over all processes' devices: "
                "jax.shard_map over a mesh of jax.devices(), and torchax_ops_c10d.map_group."
            )
        if not array.is_fully_addressable:
            raise CollectiveError(
                f"a collective between processes takes each process's own array, but this one, of shape {array.shape}, is laid "
                f"out over {len(array.sharding.device_set)} devices of several processes. Ops on such an array compute over "
                "all its parts already."
            )
        if array.ndim == 0:
            array = array.reshape(1)
        if array.devices() != {self.device}:
            array = jax.device_put(array, self.device)
        shape = (self.size * array.shape[0], *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [array])


_ONE = OneMember()
# by group name: the backend object that torch has for the group, and who its members are
_registered: dict[str, tuple[Any, Members]] = {}


def register(name: str, backend: Any, members: Members) -> None:
    """The group `name` of torch.distributed, whose backend for device "jax" is `backend`, has these members."""
    _registered[name] = (backend, members)


def members_of(op: str, group: Any, size: int | None = None) -> Members:
    """Who takes part in a collective.

    op:    for messages.
    group: a ProcessGroup (as a torch.ScriptObject, too), or its name.
    size:  how many members the call says there are, if it does.
    Raises CollectiveError if the group is no axis in scope here, no group of processes, and not of one; or of another size.
    """
    members = _of_processes(group)
    axis = groups.axis_of(op, group, size, elsewhere=members is not None)
    if axis is not None:
        return AxisMembers(axis)
    if members is None:
        return _ONE
    if size is not None and size != members.size:
        raise CollectiveError(
            f"{op}: the call says that the group {groups.name_of(group)!r} has {size} members, but it has {members.size}."
        )
    return members


def has_processes(group: Any) -> bool:
    """Whether a group is one of the backend "jax" whose members are processes, or this process alone."""
    return _of_processes(group) is not None


def _of_processes(group: Any) -> Members | None:
    """The members of a group of the backend "jax" whose members are processes."""
    name = groups.name_of(group)
    backend, members = _registered.get(name, (None, None))
    if members is None:
        return None
    found = groups.registered(name)
    if found is None or groups.backend_of(found) is not backend:
        del _registered[name]  # that group has been destroyed
        return None
    return members
