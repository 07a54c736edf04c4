"""Collectives of torch as JAX collectives: the op pack, found through pack.py, and the backend "jax" of torch.distributed."""

from torchax_ops_c10d.averaging import average_gradients, broadcast_parameters
from torchax_ops_c10d.backend import init_single_process, register
from torchax_ops_c10d.groups import CollectiveError, map_group
from torchax_ops_c10d.p2p import permute_tensor
from torchax_ops_c10d.ragged import ragged_all_to_all

__all__ = [
    "CollectiveError",
    "average_gradients",
    "broadcast_parameters",
    "init_single_process",
    "map_group",
    "permute_tensor",
    "ragged_all_to_all",
]

register()
