"""How a tensor lies on a mesh, in the words of jax (PartitionSpec, NamedSharding) and of torch (DTensor's placements).

jax names, for each dimension of the tensor, the axes it is split over; torch, for each axis, the dimension it splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from torchax_core.distributed.meshes import AnyMesh, as_mesh
from torchax_core.placement import automatic

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Layout", "placements_to_sharding", "sharding_of_layout", "sharding_to_placements"]

# jax.P("tp", None), DTensor's [Replicate(), Shard(0)], or None: the whole tensor on every device
Layout = Any


def placements_to_sharding(mesh: AnyMesh, placements: Sequence[Placement], ndim: int) -> jax.sharding.NamedSharding:
    """DTensor's placements of a tensor of `ndim` dimensions, one for each dimension of the mesh, as a jax sharding.

    placements: Replicate() and Shard(dim). Two axes that split one dimension do so in the mesh's order, as DTensor does.
    Raises ValueError for other placements, another number of them, or a dimension that the tensor has not.
    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html#module-torch.distributed.tensor.placement_types
    """
    jax_mesh = as_mesh(mesh)
    if len(placements) != len(jax_mesh.axis_names):
        raise ValueError(
            f"there is one placement for each of the mesh's axes {jax_mesh.axis_names}, but got {len(placements)}: "
            f"{[*placements]}."
        )
    axes: list[list[str]] = [[] for _ in range(ndim)]
    for axis, placement in zip(jax_mesh.axis_names, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Shard":
            dim = placement.dim  # type: ignore[attr-defined]
            if not -ndim <= dim < ndim:
                raise ValueError(
                    f"{placement!r} splits dimension {dim}, but the tensor has {ndim} dimension(s). Use Shard(dim) with "
                    f"-{ndim} <= dim < {ndim}, or Replicate()."
                )
            axes[dim].append(axis)
        elif kind != "Replicate":
            raise ValueError(f"{placement!r} for axis {axis!r}: {_REFUSED.get(kind, _UNKNOWN)}")
    return jax.sharding.NamedSharding(jax_mesh, jax.P(*(_entry(names) for names in axes)))


_UNKNOWN = "only Replicate() and Shard(dim) have a counterpart in jax."
_PARTIAL = (
    "a tensor on device 'jax' always has its values: where an op leaves partial sums on the devices, XLA adds them up before "
    "they are seen. Use Replicate() or Shard(dim)."
)
_REFUSED = {
    "Partial": _PARTIAL,
    "_MaskPartial": _PARTIAL,
    "MaskPartial": _PARTIAL,
    "_StridedShard": "a dimension is split over axes in the mesh's order. Use Shard(dim), with the mesh's axes in the order "
    "in which they are to split it.",
}


def _entry(names: Sequence[str]) -> Any:
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def sharding_to_placements(sharding: jax.sharding.Sharding, ndim: int) -> tuple[Placement, ...]:
    """A jax sharding of a tensor of `ndim` dimensions as DTensor's placements, one for each axis of its mesh.

    Raises TypeError for a sharding without a mesh, ValueError for one that no placements describe.
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard

    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise TypeError(
            f"sharding_to_placements needs a jax.sharding.NamedSharding, whose mesh placements speak of, but got {sharding}. "
            "Lay the tensor out over a mesh first: `distribute_tensor(x, mesh, jax.P())`."
        )
    spec, order = sharding.spec, sharding.mesh.axis_names
    if len(spec) > ndim:
        raise ValueError(f"{spec} speaks of {len(spec)} dimensions, but the tensor has {ndim}.")
    if getattr(spec, "unreduced", None):
        raise ValueError(
            f"{spec} has sums not taken yet over {sorted(spec.unreduced)}. Take them with jax.lax.psum first."
        )
    placements: dict[str, Placement] = {axis: Replicate() for axis in order}
    for dim, entry in enumerate(spec):
        if entry is jax.P.UNCONSTRAINED:
            raise ValueError(f"{spec} leaves dimension {dim} to XLA. Look at the sharding of the array that it made.")
        names = _axes(entry)
        if sorted(names, key=order.index) != list(names):
            raise ValueError(
                f"{spec} splits dimension {dim} over {names}, and placements can only say so in the mesh's order, {order}. "
                "Make a mesh with its axes in that order."
            )
        placements.update((axis, Shard(dim)) for axis in names)
    return tuple(placements.values())


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def sharding_of_layout(mesh: jax.sharding.Mesh, layout: Layout, shape: Sequence[int], what: str) -> Any:
    """A layout of a tensor of this shape as a sharding over `mesh`, checked.

    what: whose layout it is, for messages.
    Raises ValueError for an axis that the mesh has not, a dimension that the tensor has not, and one that cannot be split
    into equal parts; TypeError for what is no layout.
    """
    shape = tuple(shape)
    if layout is None:
        spec = jax.P()
    elif isinstance(layout, jax.P):
        spec = layout
    elif isinstance(layout, (list, tuple)) and all(hasattr(p, "is_shard") for p in layout):
        spec = placements_to_sharding(mesh, layout, len(shape)).spec
    else:
        raise TypeError(
            f"{what}: expected jax.P(...), placements such as [Replicate(), Shard(0)], or None for the whole tensor on every "
            f"device, but got {layout!r}."
        )
    if len(spec) > len(shape):
        raise ValueError(f"{what}: {spec} speaks of {len(spec)} dimensions, but the shape is {shape}.")
    check_axes(mesh, spec, what)
    for dim, entry in enumerate(spec):
        if entry is jax.P.UNCONSTRAINED:
            continue
        parts = 1
        for axis in _axes(entry):
            parts *= mesh.shape[axis]
        if shape[dim] % parts:
            raise ValueError(
                f"{what}: {spec} splits dimension {dim} of shape {shape} over {parts} devices, but {shape[dim]} is no multiple "
                f"of {parts}. Pad it, or leave that dimension whole, with None in its place."
            )
    return automatic(jax.sharding.NamedSharding(mesh, spec))


def check_axes(mesh: jax.sharding.Mesh, spec: jax.P, what: str) -> None:
    """Raise ValueError if a PartitionSpec names an axis that the mesh has not, or one twice."""
    seen: set[str] = set()
    for entry in spec:
        for axis in () if entry is jax.P.UNCONSTRAINED else _axes(entry):
            if axis not in mesh.shape:
                raise ValueError(f"{what}: {spec} names axis {axis!r}, but the mesh has the axes {mesh.axis_names}.")
            if axis in seen:
                raise ValueError(f"{what}: {spec} names axis {axis!r} twice. An axis splits one dimension.")
            seen.add(axis)
