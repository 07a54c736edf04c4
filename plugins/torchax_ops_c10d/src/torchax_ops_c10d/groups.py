"""Which mesh axis a process group is.

torch names the members of a collective by a group; JAX by an axis of the mesh that jax.shard_map runs over. `map_group`
joins the two, once for all.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import torch

from torchax_core.errors import CollectiveError
from torchax_ops_c10d.spmd import Axis

__all__ = ["Axis", "CollectiveError", "axis_of", "backend_of", "map_group", "name_of", "registered", "unboxed"]

_axes: dict[str, Axis] = {}
_lock = threading.Lock()


def map_group(group: Any, axis: Axis) -> None:
    """From now on, collectives of `group` run over the mesh axis `axis` of the jax.shard_map around them.

    group: a group's name, as given to torch.distributed._functional_collectives, or a ProcessGroup.
    axis:  the axis' name, or a tuple of names for a group that spans several, the slowest first.

    A group keeps its axis: programs compiled with it would not notice another. Raises CollectiveError if it has one.
    """
    name = name_of(group)
    axis = tuple(axis) if isinstance(axis, list) else axis
    with _lock:
        earlier = _axes.setdefault(name, axis)
    if earlier != axis:
        raise CollectiveError(
            f"map_group: the group {name!r} is the mesh axis {earlier!r} already, and cannot become {axis!r}: programs "
            "compiled so far would keep using the old one. Use another group name."
        )


def axis_of(op: str, group: Any, size: int | None = None, *, elsewhere: bool = False) -> Axis | None:
    """The mesh axis a collective runs over; None for a group of one, for which it is the identity.

    op:        for messages.
    group:     a ProcessGroup, also as a torch.ScriptObject, or a group's name.
    size:      how many members the call says there are, if it does.
    elsewhere: the group has members also where no axis is in scope; return None there.
    Raises CollectiveError if the group is no axis in scope here and has other members, or another size.
    """
    name = name_of(group)
    axis = mapped = _axes.get(name)
    length = None if mapped is None else _length(mapped)
    if length is None:
        axis = _axis_in_scope(name)
        length = None if axis is None else _length(axis)
    if axis is not None and length is not None:
        if size is not None and size != length:
            raise CollectiveError(
                f"{op}: the call says that the group {name!r} has {size} members, but it is the mesh axis {axis!r}, "
                f"which has {length}. Pass a group size of {length}."
            )
        return axis
    if elsewhere:
        return None
    if size is None:
        found = registered(name)
        size = None if found is None else found.size()
    if size == 1:
        return None
    members = "is unknown to torch.distributed" if size is None else f"has {size} members"
    if mapped is not None:
        raise CollectiveError(
            f"{op}: the group {name!r} is the mesh axis {mapped!r}, which is not in scope here. Run this code inside "
            f"jax.shard_map over a mesh with that axis."
        )
    raise CollectiveError(
        f"{op}: the group {name!r} {members}, but device 'jax' is one logical device. Say which mesh axis the group "
        f"is, torchax_ops_c10d.map_group({name!r}, 'axis name'), and run this code inside jax.shard_map over that mesh. Between "
        "processes, make it a group of the backend 'jax': torch.distributed.init_process_group('jax')."
    )


def name_of(group: Any) -> str:
    """The name torch.distributed knows a group by."""
    if isinstance(group, str):
        return group
    return str(unboxed(group).group_name)


def unboxed(group: Any) -> Any:
    """The ProcessGroup that an op was given as a torch.ScriptObject."""
    if isinstance(group, torch.ScriptObject):
        from torch.distributed import ProcessGroup

        return ProcessGroup.unbox(group)  # type: ignore[attr-defined]
    return group


def registered(name: str) -> Any:
    """The process group of that name; None if torch.distributed has none."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


def backend_of(group: Any) -> Any:
    """What torch.distributed runs collectives of tensors on device "jax" by, in that group; None if by nothing."""
    try:
        return group._get_backend(torch.device("jax"))
    except RuntimeError:
        return None


def _length(axis: Axis) -> int | None:
    """How long a mesh axis is; None outside its scope."""
    try:
        return int(jax.lax.axis_size(axis))
    except NameError:
        return None


def _axis_in_scope(name: str) -> Axis | None:
    """The axis in scope that a group is by torch's own description of it: all axes for the default group, and the axis of
    the same name for a dimension of a DeviceMesh. None if there is none of the group's size."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    group = registered(name) if axes else None
    if group is None:
        return None
    if group.group_desc == "default_pg":
        axis: Axis = axes[0] if len(axes) == 1 else axes
    else:
        axis = group.group_desc.removeprefix("mesh_")
        if axis not in axes:
            return None
    return axis if _length(axis) == group.size() else None
