"""Which mesh axis a process group is.

torch names the members of a collective by a group; JAX by an axis of the mesh that jax.shard_map runs over. `map_group`
joins the two, once for all.
"""

from __future__ import annotations

import threading
from typing import Any

import jax

from torchax_core.errors import TorchaxError

__all__ = ["Axis", "CollectiveError", "axis_of", "map_group"]

Axis = str | tuple[str, ...]

_axes: dict[str, Axis] = {}
_lock = threading.Lock()


class CollectiveError(TorchaxError, RuntimeError):
    """A collective that cannot run here: its group is no mesh axis in scope, or it asks for what JAX has not."""


def map_group(group: Any, axis: Axis) -> None:
    """From now on, collectives of `group` run over the mesh axis `axis` of the jax.shard_map around them.

    group: a group's name, as given to torch.distributed._functional_collectives, or a ProcessGroup.
    axis:  the axis' name, or a tuple of names for a group that spans several, the slowest first.

    A group keeps its axis: programs compiled with it would not notice another. Raises CollectiveError if it has one.
    """
    name = _name(group)
    axis = tuple(axis) if isinstance(axis, list) else axis
    with _lock:
        earlier = _axes.setdefault(name, axis)
    if earlier != axis:
        raise CollectiveError(
            f"map_group: the group {name!r} is the mesh axis {earlier!r} already, and cannot become {axis!r}: programs "
            "compiled so far would keep using the old one. Use another group name."
        )


def axis_of(op: str, group: Any, size: int | None = None) -> Axis | None:
    """The mesh axis a collective runs over; None for a group of one, for which it is the identity.

    op:   for messages.
    size: how many members the call says there are, if it does.
    Raises CollectiveError if the group is no axis in scope here and has other members, or another size.
    """
    name = _name(group)
    axis = _axes.get(name)
    length = None if axis is None else _length(axis)
    if length is not None:
        if size is not None and size != length:
            raise CollectiveError(
                f"{op}: the call says that the group {name!r} has {size} members, but it is the mesh axis {axis!r}, "
                f"which has {length}. Pass a group size of {length}."
            )
        return axis
    if size is None:
        size = _registered_size(name)
    if size == 1:
        return None
    members = "is unknown to torch.distributed" if size is None else f"has {size} members"
    if axis is not None:
        raise CollectiveError(
            f"{op}: the group {name!r} is the mesh axis {axis!r}, which is not in scope here. Run this code inside "
            f"jax.shard_map over a mesh with that axis."
        )
    raise CollectiveError(
        f"{op}: the group {name!r} {members}, but device 'jax' is one logical device. Say which mesh axis the group "
        f"is, torchax_ops_c10d.map_group({name!r}, 'axis name'), and run this code inside jax.shard_map over that mesh."
    )


def _name(group: Any) -> str:
    return group if isinstance(group, str) else str(group.group_name)


def _length(axis: Axis) -> int | None:
    """How long a mesh axis is; None outside its scope."""
    try:
        return int(jax.lax.axis_size(axis))
    except NameError:
        return None


def _registered_size(name: str) -> int | None:
    """The size of the process group of that name; None if torch.distributed has none."""
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name).size()
    except (RuntimeError, ValueError, KeyError):
        return None
