"""Between torch and jax, in both directions, by google/torchax's names where it does the same job.

tensor(array)      a Tensor over a jax array              t.jax()              the array of a Tensor
torch_view(tree)   a value of jax as torch sees it        jax_view(tree)       a value of torch as jax sees it
call_jax(f, ...)   a jax function on Tensors, with        call_torch(f, ...)   torch code on arrays
                   torch gradients
jax_jit, jax_value_and_grad, gradient_checkpoint, jax_shard_map, fori_loop: jax's transformations of torch code
JittableModule, extract_jax: a module as a pure function of its weights
"""

from __future__ import annotations

from torchax_core.bridge import call_jax, call_torch, jax_view, jax_view_elem, tensor, torch_view, torch_view_elem
from torchax_core.functional import (
    fori_loop,
    gradient_checkpoint,
    j2t_autograd,
    jax_jit,
    jax_shard_map,
    jax_value_and_grad,
    wrap_jax_jit,
)
from torchax_core.jittable import JittableModule, extract_all_buffers, extract_jax, set_all_buffers

__all__ = [
    "JittableModule",
    "call_jax",
    "call_torch",
    "extract_all_buffers",
    "extract_jax",
    "fori_loop",
    "gradient_checkpoint",
    "j2t_autograd",
    "jax_jit",
    "jax_shard_map",
    "jax_value_and_grad",
    "jax_view",
    "jax_view_elem",
    "set_all_buffers",
    "tensor",
    "torch_view",
    "torch_view_elem",
    "wrap_jax_jit",
]

# google/torchax's names for the two
_jax_view, _torch_view = jax_view_elem, torch_view_elem
