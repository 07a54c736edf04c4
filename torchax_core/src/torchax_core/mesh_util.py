"""Models laid out over a jax mesh: google/torchax's `torchax.mesh_util`.

A sharder says how: `(name, tensor) -> jax.sharding.PartitionSpec`. The tensor has a shape and a dtype, maybe no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from torchax_core.distributed.meshes import as_mesh
from torchax_core.distributed.modules import Rules, make_in_shards, named_tensors, shard_module, shardings_by_rules

__all__ = ["Mesh", "SingleAxisSharder"]


class SingleAxisSharder:
    """Shards the first dimension whose length is a multiple of the axis's.

    axis_name, axis_size:   of the mesh axis.
    replicate_unshardable:  a tensor without such a dimension is replicated; else it is a ValueError.
    """

    def __init__(self, axis_name: str, axis_size: int, replicate_unshardable: bool = False) -> None:
        self.axis_name = axis_name
        self.axis_size = axis_size
        self.replicate_unshardable = replicate_unshardable

    def __call__(self, name: str, shapedtype: Any) -> jax.sharding.PartitionSpec:
        shape = tuple(shapedtype.shape)
        for dimension, length in enumerate(shape):
            if length % self.axis_size == 0:
                spec: list[Any] = [None] * len(shape)
                spec[dimension] = self.axis_name
                return jax.P(*spec)
        if self.replicate_unshardable:
            return jax.P()
        raise ValueError(
            f"SingleAxisSharder: no dimension of {name}, of shape {shape}, is a multiple of the {self.axis_size} devices of axis "
            f"{self.axis_name!r}. Replicate such tensors, with replicate_unshardable=True, or give another sharder."
        )


class Mesh:
    """A jax mesh with a sharder: models are made on it, or moved to it.

    jax_mesh: a jax.sharding.Mesh.
    sharder:  default for the methods; None: a SingleAxisSharder if the mesh has one axis. The rules of
              torchax_core.distributed.shard_module will do too.
    """

    @classmethod
    def fsdp_mesh(cls, axis_name: str = "fsdp") -> Mesh:
        """All devices on one axis, each parameter sharded along its first dimension that divides by their number."""
        count = jax.device_count()
        mesh = jax.make_mesh((count,), (axis_name,), axis_types=(jax.sharding.AxisType.Auto,))
        return cls(mesh, SingleAxisSharder(axis_name, count, replicate_unshardable=True))

    def __init__(self, jax_mesh: jax.sharding.Mesh, sharder: Rules | None = None) -> None:
        self.jax_mesh = jax_mesh
        if sharder is None and len(jax_mesh.axis_names) == 1:
            sharder = SingleAxisSharder(jax_mesh.axis_names[0], jax_mesh.size)
        self._sharder = sharder

    def initialize_model_sharded(
        self,
        model_class: Callable[..., torch.nn.Module],
        init_args: tuple[Any, ...],
        init_kwargs: dict[str, Any] | None = None,
        override_sharder: Rules | None = None,
    ) -> torch.nn.Module:
        """`model_class(*init_args, **init_kwargs)`, its weights made in their shards: no device, nor the host, holds them whole.

        Raises ValueError if there is no sharder, or it cannot shard a tensor.
        """
        kwargs = init_kwargs or {}
        with torch.device("meta"):
            model = model_class(*init_args, **kwargs)

        def make() -> dict[str, torch.Tensor]:
            with torch.device("jax"):
                return named_tensors(model_class(*init_args, **kwargs))

        return make_in_shards(model, self._shardings(named_tensors(model), override_sharder), make)

    def shard_model(self, model: torch.nn.Module, override_sharder: Rules | None = None) -> torch.nn.Module:
        """The model on device "jax", its weights laid out over the mesh, in place; from the CPU they are moved one by one."""
        return shard_module(model, self.jax_mesh, self._sharder_or(override_sharder))

    def _shardings(self, tensors: dict[str, torch.Tensor], override: Rules | None) -> dict[str, Any]:
        return shardings_by_rules(tensors, as_mesh(self.jax_mesh), self._sharder_or(override))

    def _sharder_or(self, override: Rules | None) -> Rules:
        sharder = override or self._sharder
        if sharder is None:
            raise ValueError(
                f"a mesh of axes {self.jax_mesh.axis_names} needs a sharder: Mesh(mesh, sharder), with "
                "`sharder(name, tensor) -> jax.P(...)`."
            )
        return sharder
