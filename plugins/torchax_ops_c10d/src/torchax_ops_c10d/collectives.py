"""Functional collectives as JAX collectives over the mesh axis of their group (see groups.py).

Every device of a jax.shard_map runs the same program, so arguments that torch allows to differ from rank to rank, as
the split sizes of all_to_all_single, must be the same on all. JAX runs asynchronously: there is nothing to wait for.

Source: https://docs.jax.dev/en/latest/jax.lax.html#parallel-operators
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
import torch.distributed._functional_collectives  # registers the ops' meta kernels and gradients

from torchax_core import OpSet
from torchax_core.errors import ShapeError
from torchax_ops_c10d.groups import Axis, CollectiveError, axis_of

__all__ = ["ops"]

ops = OpSet("torchax_ops_c10d.collectives")

_DIRECT: dict[str, Callable[[jax.Array, Axis], jax.Array]] = {
    "sum": jax.lax.psum,
    "avg": jax.lax.pmean,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
}
# What JAX has no collective for is reduced after gathering: arrays of all members, stacked along axis 0.
_STACKED: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "avg": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "product": jnp.prod,
    "band": jnp.bitwise_and.reduce,
    "bor": jnp.bitwise_or.reduce,
    "bxor": jnp.bitwise_xor.reduce,
}


def _check_reduction(op: str, reduce_op: str) -> None:
    if reduce_op not in _STACKED:
        raise CollectiveError(f"{op}: `reduce_op` must be one of {', '.join(_STACKED)}, but is {reduce_op!r}.")


def _reduced(input: jax.Array, reduce_op: str, axis: Axis) -> jax.Array:
    if input.dtype == jnp.bool_:
        return _reduced(input.astype(jnp.int32), reduce_op, axis) != 0
    if reduce_op in _DIRECT:
        return _DIRECT[reduce_op](input, axis)
    return _STACKED[reduce_op](jax.lax.all_gather(input, axis), axis=0)


def _all_reduce(op: str, input: jax.Array, reduce_op: str, group_name) -> jax.Array:
    _check_reduction(op, reduce_op)
    axis = axis_of(op, group_name)
    return input if axis is None else _reduced(input, reduce_op, axis)


def _all_gather(op: str, input: jax.Array, group_size: int, group_name) -> jax.Array:
    axis = axis_of(op, group_name, group_size)
    if axis is None:
        return jnp.atleast_1d(input)
    return jax.lax.all_gather(input, axis, tiled=input.ndim > 0)


def _reduce_scatter(op: str, input: jax.Array, reduce_op: str, group_size: int, group_name) -> jax.Array:
    _check_reduction(op, reduce_op)
    axis = axis_of(op, group_name, group_size)
    if axis is None:
        return input
    if input.shape[0] % group_size:
        raise ShapeError(
            f"{op}: the first dimension of `input` must divide into {group_size} parts, but input.shape={input.shape}. "
            "Pad it."
        )
    if input.dtype == jnp.bool_:
        return _reduce_scatter(op, input.astype(jnp.int32), reduce_op, group_size, group_name) != 0
    if reduce_op == "sum":
        return jax.lax.psum_scatter(input, axis, tiled=True)
    parts = jax.lax.all_to_all(input, axis, 0, 0, tiled=True)
    return _STACKED[reduce_op](parts.reshape(group_size, -1, *input.shape[1:]), axis=0)


@ops.lowering("_c10d_functional::all_reduce")
def all_reduce(input, reduce_op, group_name):
    """The sum (avg, min, max, product, band, bor, bxor) of every member's `input`, the same on all of them."""
    return _all_reduce("_c10d_functional::all_reduce", input, reduce_op, group_name)


@ops.lowering("_c10d_functional::all_reduce_coalesced")
def all_reduce_coalesced(inputs, reduce_op, group_name):
    """`all_reduce` of each of `inputs`."""
    return [_all_reduce("_c10d_functional::all_reduce_coalesced", x, reduce_op, group_name) for x in inputs]


@ops.lowering("_c10d_functional::all_gather_into_tensor", "_c10d_functional_autograd::all_gather_into_tensor")
def all_gather_into_tensor(input, group_size, group_name):
    """Every member's `input`, one after another: (n, ...) -> (group_size * n, ...), () -> (group_size,)."""
    return _all_gather("_c10d_functional::all_gather_into_tensor", input, group_size, group_name)


@ops.lowering("_c10d_functional::all_gather_into_tensor_coalesced")
def all_gather_into_tensor_coalesced(inputs, group_size, group_name):
    """`all_gather_into_tensor` of each of `inputs`."""
    op = "_c10d_functional::all_gather_into_tensor_coalesced"
    return [_all_gather(op, x, group_size, group_name) for x in inputs]


@ops.lowering("_c10d_functional::reduce_scatter_tensor", "_c10d_functional_autograd::reduce_scatter_tensor")
def reduce_scatter_tensor(input, reduce_op, group_size, group_name):
    """One part of the sum (or another reduction) of every member's `input`: (n, ...) -> (n / group_size, ...).

    raises: ShapeError if n does not divide.
    """
    return _reduce_scatter("_c10d_functional::reduce_scatter_tensor", input, reduce_op, group_size, group_name)


@ops.lowering("_c10d_functional::reduce_scatter_tensor_coalesced")
def reduce_scatter_tensor_coalesced(inputs, reduce_op, group_size, group_name):
    """`reduce_scatter_tensor` of each of `inputs`."""
    op = "_c10d_functional::reduce_scatter_tensor_coalesced"
    return [_reduce_scatter(op, x, reduce_op, group_size, group_name) for x in inputs]


@ops.lowering("_c10d_functional::all_to_all_single", "_c10d_functional_autograd::all_to_all_single")
def all_to_all_single(input, output_split_sizes, input_split_sizes, group_name):
    """Part i of `input` goes to member i, and the parts received are joined: (n, ...) -> (n, ...).

    raises: CollectiveError unless all parts are of one size.
    """
    op = "_c10d_functional::all_to_all_single"
    axis = axis_of(op, group_name, len(output_split_sizes))
    members = len(output_split_sizes)
    part, left = divmod(input.shape[0], members)
    for name, sizes in {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}.items():
        if left or tuple(sizes) != (part,) * members:
            raise CollectiveError(
                f"{op}: all parts must have one size, as every device runs the same program, but `{name}` is "
                f"{tuple(sizes)} for input.shape={input.shape} and {members} members. Pad all parts to the largest."
            )
    return input if axis is None else jax.lax.all_to_all(input, axis, 0, 0, tiled=True)


@ops.lowering("_c10d_functional::broadcast")
def broadcast(input, src, group_name):
    """The `input` of member `src`, counted within the group, on all members."""
    op = "_c10d_functional::broadcast"
    axis = axis_of(op, group_name)
    length = 1 if axis is None else int(jax.lax.axis_size(axis))
    if not 0 <= src < length:
        raise CollectiveError(f"{op}: `src` must be a member of the group, 0 to {length - 1}, but is {src}.")
    if axis is None:
        return input
    if input.dtype == jnp.bool_:
        return broadcast(input.astype(jnp.int32), src, group_name) != 0
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axis) == src, input, jnp.zeros_like(input)), axis)


@ops.lowering("_c10d_functional::wait_tensor")
def wait_tensor(tensor):
    """The tensor: JAX waits by itself where a value is needed."""
    return tensor


@ops.lowering("_c10d_functional::_wrap_tensor_autograd")
def _wrap_tensor_autograd(input):
    """The tensor. On other devices, a subclass that waits for the collective at its first use."""
    return input


# These two are out= forms in all but their schema's name, so the core does not derive them.


@ops.decomposition("_c10d_functional::all_gather_into_tensor_out")
def all_gather_into_tensor_out(input, group_size, group_name, *, out):
    """`all_gather_into_tensor`, written to `out`."""
    return out.copy_(torch.ops._c10d_functional.all_gather_into_tensor(input, group_size, group_name))


@ops.decomposition("_c10d_functional::reduce_scatter_tensor_out")
def reduce_scatter_tensor_out(input, reduce_op, group_size, group_name, *, out):
    """`reduce_scatter_tensor`, written to `out`."""
    return out.copy_(torch.ops._c10d_functional.reduce_scatter_tensor(input, reduce_op, group_size, group_name))


# Sending to one member is another program on each device. Left undefined, torch's own kernel would run: it looks for
# the group's process backend and reads the memory of a tensor that has none.


def _point_to_point(op: str) -> CollectiveError:
    return CollectiveError(
        f"{op}: device 'jax' has no point-to-point communication, as every device runs the same program. Use "
        "torchax_core.interop.call_jax with jax.lax.ppermute, which says all pairs of sender and receiver at once."
    )


@ops.lowering("_c10d_functional::isend")
def isend(tensor, dst, tag, group_name):
    """Raises CollectiveError."""
    raise _point_to_point("_c10d_functional::isend")


@ops.lowering("_c10d_functional::irecv")
def irecv(tensor, src, tag, group_name):
    """Raises CollectiveError."""
    raise _point_to_point("_c10d_functional::irecv")


@ops.lowering("_c10d_functional::batch_p2p_ops")
def batch_p2p_ops(op_list, peer_list, tag_list, tensors, group_name):
    """Raises CollectiveError."""
    raise _point_to_point("_c10d_functional::batch_p2p_ops")
