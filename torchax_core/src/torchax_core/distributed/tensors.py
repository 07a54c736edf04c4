"""One tensor over a mesh: laid out, gathered, looked at part by part."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch

from torchax_core.bridge import lay_out
from torchax_core.convert import array_from_torch, is_traced
from torchax_core.distributed.layouts import Layout, sharding_of_layout
from torchax_core.distributed.meshes import AnyMesh, as_mesh
from torchax_core.tensor import Tensor, wrap_array

__all__ = ["LocalShard", "distribute_tensor", "full_tensor", "local_shards", "with_sharding_constraint"]


def distribute_tensor(tensor: torch.Tensor, mesh: AnyMesh, layout: Layout = None) -> torch.Tensor:
    """A tensor with the same values, laid out over a mesh: same shape and dtype, on device "jax", with gradients.

    tensor: on the CPU or on "jax". Of a CPU tensor without gradients, each device is sent its part only.
    layout: jax.P, DTensor's placements, or None: the whole on every device.
    The result is a tensor like any other, and no DTensor: its shape is that of the whole, and ops on it are ordinary ones.
    In a jitted function this is a constraint on where XLA puts the tensor.
    Raises ValueError for a layout that does not fit the mesh or the shape.
    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html#torch.distributed.tensor.distribute_tensor
    """
    sharding = sharding_of_layout(as_mesh(mesh), layout, tensor.shape, "distribute_tensor")
    if tensor.device.type == "cpu" and not (tensor.requires_grad and torch.is_grad_enabled()):
        return wrap_array(array_from_torch(tensor, sharding)).requires_grad_(tensor.requires_grad)
    return lay_out(tensor, sharding)


def with_sharding_constraint(tensor: torch.Tensor, mesh: AnyMesh, layout: Layout = None) -> torch.Tensor:
    """In a jitted function: the same tensor, which XLA lays out like this; its gradient too. Elsewhere distribute_tensor.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.with_sharding_constraint.html
    """
    sharding = sharding_of_layout(as_mesh(mesh), layout, tensor.shape, "with_sharding_constraint")
    return lay_out(tensor, sharding)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whole on every device that holds a part of it: same values, with gradients.

    For the values on the host, `tensor.cpu()` does. Raises ValueError in a jitted function, where XLA decides what lies where
    and `with_sharding_constraint(tensor, mesh)` says so.
    """
    array = _array(tensor, "full_tensor")
    if is_traced(array):
        raise ValueError(
            "full_tensor: in a jitted function a tensor lies wherever XLA puts it, on no mesh that is known. Name the mesh: "
            "`with_sharding_constraint(tensor, mesh)`."
        )
    if len(array.sharding.device_set) == 1 or array.sharding.is_fully_replicated:
        return tensor
    if not isinstance(array.sharding, jax.sharding.NamedSharding):
        raise ValueError(
            f"full_tensor: the tensor lies by {array.sharding}, which has no mesh. Name one: `distribute_tensor(tensor, mesh)`."
        )
    return lay_out(tensor, jax.sharding.NamedSharding(array.sharding.mesh, jax.P()))


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """What one device holds of a tensor. `whole[index]` is `tensor`, which lies on `device` alone."""

    device: Any
    index: tuple[slice, ...]
    tensor: torch.Tensor


def local_shards(tensor: torch.Tensor) -> list[LocalShard]:
    """What each device of this process holds of a tensor, in the devices' order, without a copy or gradients.

    Raises ValueError in a jitted function: see jax_shard_map for code that runs on each device.
    """
    array = _array(tensor.detach(), "local_shards")
    if is_traced(array):
        raise ValueError(
            "local_shards: in a jitted function a tensor is whole, and XLA splits it. Code for one device's part runs under "
            "torchax_core.interop.jax_shard_map."
        )
    return [LocalShard(shard.device, shard.index, wrap_array(shard.data)) for shard in array.addressable_shards]


def _array(tensor: torch.Tensor, what: str) -> Any:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{what} takes a tensor on device 'jax', but got one on {tensor.device}. Move it, with `.to('jax')`."
        )
    return tensor.jax()
