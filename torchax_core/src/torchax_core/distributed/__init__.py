"""Models over many devices: one process, one program, tensors whose arrays lie in parts on the devices of a mesh.

shard_module(module, mesh, rules)            lay out a module's tensors by their names; on "meta", make them in their parts
distribute_tensor, with_sharding_constraint  lay out one tensor; in a jitted function, a constraint on it
full_tensor, local_shards                    the whole on every device; the part that each device holds
to_jax_mesh, to_device_mesh                  torch's DeviceMesh and jax's Mesh, each from the other
placements_to_sharding, sharding_to_placements   DTensor's placements and jax's NamedSharding, each from the other

Between devices, XLA moves what ops need (GSPMD). See docs/distributed.md.
"""

from __future__ import annotations

from torchax_core.distributed.layouts import placements_to_sharding, sharding_to_placements
from torchax_core.distributed.meshes import to_device_mesh, to_jax_mesh
from torchax_core.distributed.modules import shard_module
from torchax_core.distributed.tensors import (
    LocalShard,
    distribute_tensor,
    full_tensor,
    local_shards,
    with_sharding_constraint,
)

__all__ = [
    "LocalShard",
    "distribute_tensor",
    "full_tensor",
    "local_shards",
    "placements_to_sharding",
    "shard_module",
    "sharding_to_placements",
    "to_device_mesh",
    "to_jax_mesh",
    "with_sharding_constraint",
]
