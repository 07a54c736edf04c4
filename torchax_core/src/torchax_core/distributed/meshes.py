"""torch's DeviceMesh and jax's Mesh, each from the other. Rank i of the one is `jax.devices()[i]` of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from torchax_core.placement import automatic_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AnyMesh", "as_mesh", "to_device_mesh", "to_jax_mesh"]

AnyMesh = Any  # a jax.sharding.Mesh or a torch.distributed.device_mesh.DeviceMesh


def to_jax_mesh(device_mesh: DeviceMesh) -> jax.sharding.Mesh:
    """A DeviceMesh as a jax mesh of the same shape: rank i is `jax.devices()[i]`, whatever the mesh's device type.

    Its axes have the names of the mesh's dimensions, or "dim_0", "dim_1", ... if those have none.
    Raises ValueError if there are fewer devices than ranks.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh
    """
    ranks = device_mesh.mesh.numpy()
    devices = jax.devices()
    if ranks.max() >= len(devices):
        raise ValueError(
            f"to_jax_mesh: the mesh {device_mesh} has rank {ranks.max()}, but jax has {len(devices)} device(s). Take a smaller "
            f"mesh, or, to try it on CPU, start Python with XLA_FLAGS=--xla_force_host_platform_device_count={ranks.max() + 1}."
        )
    names = device_mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(ranks.ndim))
    found = np.array([devices[rank] for rank in ranks.flat], dtype=object).reshape(ranks.shape)
    return jax.sharding.Mesh(found, tuple(names), axis_types=(jax.sharding.AxisType.Auto,) * ranks.ndim)


def to_device_mesh(mesh: jax.sharding.Mesh) -> DeviceMesh:
    """A jax mesh as a DeviceMesh of device type "jax", with the axes' names.

    Where torch.distributed has a process group with a rank for every device of the mesh, the result is complete. Without one
    it has a shape, names and ranks, as seen from rank 0, and no process groups: torch cannot slice it (`mesh["tp"]`).
    Raises RuntimeError for a torch without torch.distributed.
    """
    if not torch.distributed.is_available():
        raise RuntimeError("to_device_mesh: this torch was built without torch.distributed, and so has no DeviceMesh.")
    from torch.distributed.device_mesh import DeviceMesh

    numbers = {device: i for i, device in enumerate(jax.devices())}
    ranks = torch.tensor([numbers[device] for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    names = tuple(mesh.axis_names)
    initialized = torch.distributed.is_initialized()
    if initialized and torch.distributed.get_world_size() > int(ranks.max()):
        return DeviceMesh("jax", ranks, mesh_dim_names=names)
    return DeviceMesh("jax", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def as_mesh(mesh: AnyMesh) -> jax.sharding.Mesh:
    """A jax mesh or DeviceMesh as a jax mesh with automatic axes. Raises TypeError for anything else."""
    if not isinstance(mesh, jax.sharding.Mesh):
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"expected a mesh, jax.make_mesh((2, 4), ('dp', 'tp')) or torch.distributed's DeviceMesh, but got {mesh!r}."
            )
        return to_jax_mesh(mesh)
    return automatic_mesh(mesh)
