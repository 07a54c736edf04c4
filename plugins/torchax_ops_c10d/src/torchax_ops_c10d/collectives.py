"""Functional collectives: `_c10d_functional`, which torch.distributed._functional_collectives and DTensor call.

Each reads arrays, runs among the members of its group (members.py), and returns new tensors. Their gradients are torch's own.
JAX runs asynchronously: there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives  # registers the ops' meta kernels and gradients

from torchax_core import OpSet
from torchax_core.errors import ShapeError
from torchax_ops_c10d import eager, p2p
from torchax_ops_c10d.groups import CollectiveError
from torchax_ops_c10d.members import members_of

__all__ = ["ops"]

ops = OpSet("torchax_ops_c10d.collectives")


def _all_reduce(op: str, inputs: Sequence[torch.Tensor], reduce_op: str, group_name) -> list[torch.Tensor]:
    results = eager.all_reduce(op, members_of(op, group_name), inputs, reduce_op)
    return [eager.tensor_of(result, x.shape) for result, x in zip(results, inputs, strict=True)]


def _all_gather(op: str, input: torch.Tensor, group_size: int, group_name) -> torch.Tensor:
    gathered = eager.all_gather(members_of(op, group_name, group_size), input)
    return eager.tensor_of(gathered, (group_size * input.shape[0], *input.shape[1:]) if input.ndim else (group_size,))


def _reduce_scatter(op: str, input: torch.Tensor, reduce_op: str, group_size: int, group_name) -> torch.Tensor:
    result = eager.reduce_scatter(op, members_of(op, group_name, group_size), input, reduce_op)
    return eager.tensor_of(result, (input.shape[0] // group_size, *input.shape[1:]))


@ops.decomposition("_c10d_functional::all_reduce", whole=False)
def all_reduce(input, reduce_op, group_name):
    """The sum (avg, min, max, product, band, bor, bxor) of every member's `input`, the same on all of them."""
    return _all_reduce("_c10d_functional::all_reduce", [input], reduce_op, group_name)[0]


@ops.decomposition("_c10d_functional::all_reduce_coalesced", whole=False)
def all_reduce_coalesced(inputs, reduce_op, group_name):
    """`all_reduce` of each of `inputs`."""
    return _all_reduce("_c10d_functional::all_reduce_coalesced", inputs, reduce_op, group_name)


@ops.decomposition(
    "_c10d_functional::all_gather_into_tensor", "_c10d_functional_autograd::all_gather_into_tensor", whole=False
)
def all_gather_into_tensor(input, group_size, group_name):
    """Every member's `input`, one after another: (n, ...) -> (group_size * n, ...), () -> (group_size,)."""
    return _all_gather("_c10d_functional::all_gather_into_tensor", input, group_size, group_name)


@ops.decomposition("_c10d_functional::all_gather_into_tensor_coalesced", whole=False)
def all_gather_into_tensor_coalesced(inputs, group_size, group_name):
    """`all_gather_into_tensor` of each of `inputs`."""
    op = "_c10d_functional::all_gather_into_tensor_coalesced"
    return [_all_gather(op, x, group_size, group_name) for x in inputs]


@ops.decomposition(
    "_c10d_functional::reduce_scatter_tensor", "_c10d_functional_autograd::reduce_scatter_tensor", whole=False
)
def reduce_scatter_tensor(input, reduce_op, group_size, group_name):
    """One part of the sum (or another reduction) of every member's `input`: (n, ...) -> (n / group_size, ...).

    raises: ShapeError if n does not divide.
    """
    return _reduce_scatter("_c10d_functional::reduce_scatter_tensor", input, reduce_op, group_size, group_name)


@ops.decomposition("_c10d_functional::reduce_scatter_tensor_coalesced", whole=False)
def reduce_scatter_tensor_coalesced(inputs, reduce_op, group_size, group_name):
    """`reduce_scatter_tensor` of each of `inputs`."""
    op = "_c10d_functional::reduce_scatter_tensor_coalesced"
    return [_reduce_scatter(op, x, reduce_op, group_size, group_name) for x in inputs]


@ops.decomposition("_c10d_functional::all_to_all_single", "_c10d_functional_autograd::all_to_all_single", whole=False)
def all_to_all_single(input, output_split_sizes, input_split_sizes, group_name):
    """Part i of `input` goes to member i, and the parts received are joined: (n, ...) -> (m, ...).

    Between processes, parts may have different sizes. raises: ShapeError unless the sizes add up and agree.
    """
    op = "_c10d_functional::all_to_all_single"
    members = members_of(op, group_name, len(output_split_sizes))
    result = eager.all_to_all(op, members, input, output_split_sizes, input_split_sizes)
    return eager.tensor_of(result, (sum(output_split_sizes), *input.shape[1:]))


@ops.decomposition("_c10d_functional::broadcast", whole=False)
def broadcast(input, src, group_name):
    """The `input` of member `src`, counted within the group, on all members."""
    op = "_c10d_functional::broadcast"
    return eager.tensor_of(eager.broadcast(op, members_of(op, group_name), input, src), input.shape)


@ops.lowering("_c10d_functional::wait_tensor")
def wait_tensor(tensor):
    """The tensor: JAX waits by itself where a value is needed."""
    return tensor


@ops.lowering("_c10d_functional::_wrap_tensor_autograd")
def _wrap_tensor_autograd(input):
    """The tensor. On other devices, a subclass that waits for the collective at its first use."""
    return input


# -- forms that write ----------------------------------------------------------------------------


@ops.decomposition("_c10d_functional::all_reduce_", whole=False)
def all_reduce_(input, reduce_op, group_name):
    """`all_reduce`, written to `input`."""
    return input.copy_(torch.ops._c10d_functional.all_reduce(input, reduce_op, group_name))


@ops.decomposition("_c10d_functional::all_reduce_coalesced_", whole=False)
def all_reduce_coalesced_(inputs, reduce_op, group_name):
    """`all_reduce_coalesced`, written to `inputs`."""
    for x, result in zip(
        inputs, torch.ops._c10d_functional.all_reduce_coalesced(inputs, reduce_op, group_name), strict=True
    ):
        x.copy_(result)
    return inputs


@ops.decomposition("_c10d_functional::broadcast_", whole=False)
def broadcast_(input, src, group_name):
    """`broadcast`, written to `input`."""
    return input.copy_(torch.ops._c10d_functional.broadcast(input, src, group_name))


@ops.decomposition("_c10d_functional::all_gather_into_tensor_out", whole=False)
def all_gather_into_tensor_out(input, group_size, group_name, *, out):
    """`all_gather_into_tensor`, written to `out`."""
    return out.copy_(torch.ops._c10d_functional.all_gather_into_tensor(input, group_size, group_name))


@ops.decomposition("_c10d_functional::reduce_scatter_tensor_out", whole=False)
def reduce_scatter_tensor_out(input, reduce_op, group_size, group_name, *, out):
    """`reduce_scatter_tensor`, written to `out`."""
    return out.copy_(torch.ops._c10d_functional.reduce_scatter_tensor(input, reduce_op, group_size, group_name))


# -- point to point ------------------------------------------------------------------------------
#
# Left undefined, torch's own kernels would run: they read the memory of a tensor that has none.


@ops.decomposition("_c10d_functional::isend", whole=False)
def isend(tensor, dst, tag, group_name):
    """Raises CollectiveError: its result cannot be waited for. torch.distributed.isend works between processes."""
    raise p2p.point_to_point("_c10d_functional::isend")


@ops.decomposition("_c10d_functional::irecv", whole=False)
def irecv(tensor, src, tag, group_name):
    """Raises CollectiveError: its result cannot be waited for. torch.distributed.irecv works between processes."""
    raise p2p.point_to_point("_c10d_functional::irecv")


@ops.decomposition("_c10d_functional::batch_p2p_ops", whole=False)
def batch_p2p_ops(op_list, peer_list, tag_list, tensors, group_name):
    """For each "isend" its tensor, for each "irecv" what is received into its tensor.

    op_list: "isend" or "irecv" for each of `tensors`; peer_list: whom to or from. Inside jax.shard_map the batch must be a
    shift (see p2p.py).
    """
    op = "_c10d_functional::batch_p2p_ops"
    if unknown := set(op_list) - {"isend", "irecv"}:
        raise CollectiveError(f"{op}: `op_list` must hold 'isend' and 'irecv', but has {sorted(unknown)}.")
    if not len(op_list) == len(peer_list) == len(tag_list) == len(tensors):
        raise ShapeError(
            f"{op}: the lists must be of one length, but have {len(op_list)}, {len(peer_list)}, {len(tag_list)} and "
            f"{len(tensors)}."
        )
    works, results = [], []
    for kind, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        result = tensor.clone()
        results.append(result)
        works.append((p2p.send if kind == "isend" else p2p.receive)(op, group_name, result, peer, tag))
    for work in works:
        work.wait()
    return results
