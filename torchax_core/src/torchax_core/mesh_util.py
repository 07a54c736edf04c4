"""Models laid out over a jax mesh: google/torchax's `torchax.mesh_util`.

A sharder says how: `(name, tensor) -> jax.sharding.PartitionSpec`. The tensor has a shape and a dtype, maybe no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from torchax_core.functional import jax_jit
from torchax_core.jittable import extract_all_buffers, tied_names
from torchax_core.placement import automatic
from torchax_core.tensor import Tensor

__all__ = ["Mesh", "SingleAxisSharder"]

Sharder = Callable[[str, Any], jax.sharding.PartitionSpec]


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
    sharder:  default for the methods; None: a SingleAxisSharder if the mesh has one axis.
    """

    @classmethod
    def fsdp_mesh(cls, axis_name: str = "fsdp") -> Mesh:
        """All devices on one axis, each parameter sharded along its first dimension that divides by their number."""
        count = jax.device_count()
        mesh = jax.make_mesh((count,), (axis_name,), axis_types=(jax.sharding.AxisType.Auto,))
        return cls(mesh, SingleAxisSharder(axis_name, count, replicate_unshardable=True))

    def __init__(self, jax_mesh: jax.sharding.Mesh, sharder: Sharder | None = None) -> None:
        self.jax_mesh = jax_mesh
        if sharder is None and len(jax_mesh.axis_names) == 1:
            sharder = SingleAxisSharder(jax_mesh.axis_names[0], jax_mesh.size)
        self._sharder = sharder

    def initialize_model_sharded(
        self,
        model_class: Callable[..., torch.nn.Module],
        init_args: tuple[Any, ...],
        init_kwargs: dict[str, Any] | None = None,
        override_sharder: Sharder | None = None,
    ) -> torch.nn.Module:
        """`model_class(*init_args, **init_kwargs)`, its weights made in their shards: no device, nor the host, holds them whole.

        Raises ValueError if there is no sharder, or it cannot shard a tensor.
        """
        kwargs = init_kwargs or {}
        with torch.device("meta"):
            model = model_class(*init_args, **kwargs)
        tensors = _tensors(model)
        names = tied_names(tensors)
        aliases = {alias for group in names.values() for alias in group}
        shardings = {n: s for n, s in self._shardings(tensors, override_sharder).items() if n not in aliases}

        def make() -> dict[str, torch.Tensor]:
            with torch.device("jax"):
                made = _tensors(model_class(*init_args, **kwargs))
            return {name: made[name].detach() for name in shardings}

        values = jax_jit(make, {"out_shardings": shardings})()
        for name, value in values.items():
            if isinstance(tensors[name], torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=tensors[name].requires_grad)
            for place in (name, *names.get(name, ())):
                owner, _, attribute = place.rpartition(".")
                setattr(model.get_submodule(owner), attribute, value)
        return model

    def shard_model(self, model: torch.nn.Module, override_sharder: Sharder | None = None) -> torch.nn.Module:
        """The model moved to device "jax", its weights laid out over the mesh, in place."""
        model.to("jax")
        tensors = {name: value for name, value in _tensors(model).items() if isinstance(value, Tensor)}
        for name, sharding in self._shardings(tensors, override_sharder).items():
            tensors[name].shard_(sharding)  # type: ignore[attr-defined]
        return model

    def _shardings(self, tensors: dict[str, torch.Tensor], override: Sharder | None) -> dict[str, Any]:
        sharder = override or self._sharder
        if sharder is None:
            raise ValueError(
                f"a mesh of axes {self.jax_mesh.axis_names} needs a sharder: Mesh(mesh, sharder), with "
                "`sharder(name, tensor) -> jax.P(...)`."
            )
        named = jax.sharding.NamedSharding
        return {name: automatic(named(self.jax_mesh, sharder(name, tensor))) for name, tensor in tensors.items()}


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    params, others = extract_all_buffers(model)
    return {**params, **others}
