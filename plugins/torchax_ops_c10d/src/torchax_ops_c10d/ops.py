"""The ops that torch.distributed's own calls dispatch to: in place, with a ProcessGroup, and returning a Work.

    dist.all_reduce(t)  ->  ProcessGroup.allreduce  ->  c10d::allreduce_(Tensor[], ProcessGroup, ReduceOp, ...)

Where torch passes lists of tensors, it is for one device: they hold one each (coalesced forms apart). JAX runs asynchronously
by itself, so a Work is done once the program is under way; a value that is read waits for it.

Source: https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from torchax_core import OpSet
from torchax_core.tensor import active
from torchax_ops_c10d import eager, p2p
from torchax_ops_c10d.backend import factor_of
from torchax_ops_c10d.groups import CollectiveError, unboxed
from torchax_ops_c10d.members import Members, members_of

__all__ = ["ops"]

ops = OpSet("torchax_ops_c10d.ops")

Tensors = list[torch.Tensor]


def done(tensors: Any) -> Any:
    """A Work that is done, with these results, as ops return it."""
    from torch._C._distributed_c10d import _create_work_from_future

    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return boxed(_create_work_from_future(future))


def boxed(work: Work) -> Any:
    """A Work as an op returns it."""
    return work.boxed()  # type: ignore[attr-defined]


def _one(op: str, tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise CollectiveError(f"{op}: takes the tensor of one device, but got {len(tensors)}.")
    return tensors[0]


def _reduction(op: str, reduce_op: Any, group: Any) -> tuple[str, float | None]:
    """The name of a reduction that an op was given as a torch.ScriptObject, and its factor."""
    name = ReduceOp.RedOpType(reduce_op.op()).name.lower()
    if name != "premul_sum":
        return name, None
    factor = factor_of(reduce_op, group)
    if factor is None:
        raise CollectiveError(
            f"{op}: the factor of PREMUL_SUM does not reach device 'jax' through this group and this version of torch. "
            "Multiply the tensor, and use ReduceOp.SUM."
        )
    return name, factor


def _reduced_in_place(op: str, tensors: Tensors, group: Any, reduce_op: Any) -> None:
    members = members_of(op, group)
    results = eager.all_reduce(op, members, tensors, *_reduction(op, reduce_op, group))
    for tensor, result in zip(tensors, results, strict=True):
        eager.write(tensor, result)


@ops.decomposition("c10d::allreduce_", whole=False)
def allreduce_(tensors, process_group, reduce_op, sparse_indices, async_op=True, timeout=-1):
    """torch.distributed.all_reduce."""
    if sparse_indices is not None:
        raise CollectiveError("c10d::allreduce_: device 'jax' has no sparse tensors. Use a dense one.")
    _reduced_in_place("c10d::allreduce_", tensors, process_group, reduce_op)
    return tensors, done(tensors)


@ops.decomposition("c10d::allreduce_coalesced_", whole=False)
def allreduce_coalesced_(tensors, process_group, reduce_op, async_op=True, timeout=-1):
    """all_reduce calls inside the coalescing manager: one program for all."""
    _reduced_in_place("c10d::allreduce_coalesced_", tensors, process_group, reduce_op)
    return done(tensors)


@ops.decomposition("c10d::reduce_", whole=False)
def reduce_(tensors, process_group, reduce_op, root_rank, root_tensor, async_op=True, timeout=-1):
    """torch.distributed.reduce: other members' tensors stay as they are."""
    op = "c10d::reduce_"
    reduction, factor = _reduction(op, reduce_op, process_group)
    eager.reduce(op, members_of(op, process_group), _one(op, tensors), root_rank, reduction, factor)
    return done(tensors)


@ops.decomposition("c10d::broadcast_", whole=False)
def broadcast_(tensors, process_group, root_rank, root_tensor, async_op=True, timeout=-1):
    """torch.distributed.broadcast."""
    op = "c10d::broadcast_"
    tensor = _one(op, tensors)
    eager.write(tensor, eager.broadcast(op, members_of(op, process_group), tensor, root_rank))
    return tensors, done(tensors)


@ops.decomposition("c10d::allgather_", whole=False)
def allgather_(output_tensors, input_tensors, process_group, async_op=True, timeout=-1):
    """torch.distributed.all_gather. Between processes, tensors may have different shapes."""
    op = "c10d::allgather_"
    outputs, tensor = _one(op, output_tensors), _one(op, input_tensors)
    eager.all_gather_list(op, members_of(op, process_group), outputs, tensor)
    return output_tensors, done(output_tensors)


@ops.decomposition("c10d::allgather_coalesced_", whole=False)
def allgather_coalesced_(output_lists, input_list, process_group, async_op=True):
    """torch.distributed.all_gather_coalesced: output_lists[member][i] is that member's input_list[i]."""
    op = "c10d::allgather_coalesced_"
    members = members_of(op, process_group)
    for i, tensor in enumerate(input_list):
        eager.all_gather_list(op, members, [outputs[i] for outputs in output_lists], tensor)
    return done(output_lists)


def _gather_into(op: str, members: Members, output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.numel() != members.size * tensor.numel():
        raise CollectiveError(
            f"{op}: the output must have {members.size} times the elements of the input, whose shape is {tuple(tensor.shape)}, "
            f"but its shape is {tuple(output.shape)}."
        )
    eager.write(output, eager.all_gather(members, tensor))


@ops.decomposition("c10d::_allgather_base_", whole=False)
def _allgather_base_(output_tensor, input_tensor, process_group, async_op=True, timeout=-1):
    """torch.distributed.all_gather_into_tensor: joined along dimension 0, or stacked."""
    op = "c10d::_allgather_base_"
    _gather_into(op, members_of(op, process_group), output_tensor, input_tensor)
    return output_tensor, done([output_tensor])


@ops.decomposition("c10d::allgather_into_tensor_coalesced_", whole=False)
def allgather_into_tensor_coalesced_(outputs, inputs, process_group, async_op=True):
    """all_gather_into_tensor calls inside the coalescing manager."""
    op = "c10d::allgather_into_tensor_coalesced_"
    members = members_of(op, process_group)
    for output, tensor in zip(outputs, inputs, strict=True):
        _gather_into(op, members, output, tensor)
    return done(outputs)


@ops.decomposition("c10d::reduce_scatter_", whole=False)
def reduce_scatter_(output_tensors, input_tensors, process_group, reduce_op, async_op=True, timeout=-1):
    """torch.distributed.reduce_scatter. Between processes, tensors may have different shapes."""
    op = "c10d::reduce_scatter_"
    members = members_of(op, process_group)
    output, tensors = _one(op, output_tensors), _one(op, input_tensors)
    eager.reduce_scatter_list(op, members, output, tensors, *_reduction(op, reduce_op, process_group))
    return output_tensors, done(output_tensors)


def _reduce_scatter_into(
    op: str, members: Members, output: torch.Tensor, tensor: torch.Tensor, reduction: str, factor: float | None
) -> None:
    if tensor.numel() != members.size * output.numel():
        raise CollectiveError(
            f"{op}: the input must have {members.size} times the elements of the output, whose shape is {tuple(output.shape)}, "
            f"but its shape is {tuple(tensor.shape)}."
        )
    flat = tensor.reshape(members.size, *output.shape)
    eager.write(output, eager.reduce_scatter(op, members, flat, reduction, factor))


@ops.decomposition("c10d::_reduce_scatter_base_", whole=False)
def _reduce_scatter_base_(output_tensor, input_tensor, process_group, reduce_op, async_op=True, timeout=-1):
    """torch.distributed.reduce_scatter_tensor: of an input joined along dimension 0, or stacked."""
    op = "c10d::_reduce_scatter_base_"
    members = members_of(op, process_group)
    _reduce_scatter_into(op, members, output_tensor, input_tensor, *_reduction(op, reduce_op, process_group))
    return output_tensor, done([output_tensor])


@ops.decomposition("c10d::reduce_scatter_tensor_coalesced_", whole=False)
def reduce_scatter_tensor_coalesced_(outputs, inputs, process_group, reduce_op, async_op=True, timeout=-1):
    """reduce_scatter_tensor calls inside the coalescing manager."""
    op = "c10d::reduce_scatter_tensor_coalesced_"
    members, reduction = members_of(op, process_group), _reduction(op, reduce_op, process_group)
    for output, tensor in zip(outputs, inputs, strict=True):
        _reduce_scatter_into(op, members, output, tensor, *reduction)
    return done(outputs)


@ops.decomposition("c10d::scatter_", whole=False)
def scatter_(output_tensors, input_tensors, process_group, root_rank, async_op=True, timeout=-1):
    """torch.distributed.scatter."""
    op = "c10d::scatter_"
    tensors = _one(op, input_tensors) if input_tensors else []
    eager.scatter(op, members_of(op, process_group), _one(op, output_tensors), tensors, root_rank)
    return output_tensors, done(output_tensors)


@ops.decomposition("c10d::gather_", whole=False)
def gather_(output_tensors, input_tensors, process_group, root_rank, async_op=True, timeout=-1):
    """torch.distributed.gather."""
    op = "c10d::gather_"
    outputs = _one(op, output_tensors) if output_tensors else []
    eager.gather(op, members_of(op, process_group), outputs, _one(op, input_tensors), root_rank)
    return done(outputs)


@ops.decomposition("c10d::gather_into_tensor_", whole=False)
def gather_into_tensor_(output_tensor, input_tensor, process_group, root_rank, async_op=True, timeout=-1):
    """As _allgather_base_, written on the member `root_rank` only."""
    op = "c10d::gather_into_tensor_"
    members = members_of(op, process_group)
    eager.check_source(op, members, root_rank)
    result = eager.all_gather(members, input_tensor)
    if members.rank in (None, root_rank):
        eager.write(output_tensor, result)
    return output_tensor, done([output_tensor])


@ops.decomposition("c10d::alltoall_", whole=False)
def alltoall_(output_tensors, input_tensors, process_group, async_op=True, timeout=-1):
    """torch.distributed.all_to_all. Between processes, tensors may have different shapes."""
    op = "c10d::alltoall_"
    eager.all_to_all_list(op, members_of(op, process_group), output_tensors, input_tensors)
    return output_tensors, done(output_tensors)


@ops.decomposition("c10d::alltoall_base_", whole=False)
def alltoall_base_(output, input, process_group, output_split_sizes, input_split_sizes, async_op=True, timeout=-1):
    """torch.distributed.all_to_all_single. Between processes, parts may have different sizes."""
    op = "c10d::alltoall_base_"
    members = members_of(op, process_group)
    eager.write(output, eager.all_to_all(op, members, input, output_split_sizes, input_split_sizes))
    return done([output])


@ops.decomposition("c10d::barrier", whole=False)
def barrier(tensor, process_group, device_ids, async_op=True, timeout=-1):
    """torch.distributed.barrier: returns once every process has come. Inside jax.shard_map, and for one: nothing."""
    op = "c10d::barrier"
    group = unboxed(process_group)
    members = members_of(op, group)
    if members.rank is not None and members.size > 1:
        import jax.numpy as jnp

        from torchax_ops_c10d import spmd

        done_by_all = members.run(spmd.reduce, jnp.zeros(1, jnp.int32), reduction="sum")
        if active.trace is None:  # a jitted function waits for the others where it sends
            done_by_all.block_until_ready()
    return done([tensor])


@ops.decomposition("c10d::send", whole=False)
def send(tensors, process_group, dst, tag):
    """torch.distributed.send and isend, between processes."""
    op = "c10d::send"
    return boxed(p2p.send(op, unboxed(process_group), _one(op, tensors), dst, tag))


@ops.decomposition("c10d::recv_", whole=False)
def recv_(tensors, process_group, src, tag):
    """torch.distributed.recv and irecv, between processes."""
    op = "c10d::recv_"
    return boxed(p2p.receive(op, unboxed(process_group), _one(op, tensors), src, tag))


@ops.decomposition("c10d::recv_any_source_", whole=False)
def recv_any_source_(tensors, process_group, tag):
    """torch.distributed.recv of no source in particular, between processes."""
    op = "c10d::recv_any_source_"
    return boxed(p2p.receive(op, unboxed(process_group), _one(op, tensors), None, tag))


@ops.decomposition("c10d::check_for_nan", whole=False)
def check_for_nan(tensor):
    """Raises RuntimeError if the tensor has a NaN."""
    if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
        raise RuntimeError(f"c10d::check_for_nan: a tensor of shape {tuple(tensor.shape)} has a NaN.")
