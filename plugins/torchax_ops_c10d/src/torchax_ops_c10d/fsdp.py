"""torch.distributed.fsdp.fully_shard's own ops: parameters into one flat tensor to gather or to scatter, and out of it.

They write into tensors that fully_shard keeps.
Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import torch

from torchax_core import OpSet

__all__ = ["ops"]

ops = OpSet("torchax_ops_c10d.fsdp")


@ops.decomposition("fsdp::all_gather_copy_in", whole=False)
def all_gather_copy_in(all_gather_inputs, all_gather_output, inp_split_sizes, all_gather_input_numel, rank):
    """This rank's part of `all_gather_output`, (members * all_gather_input_numel,), after `all_gather_inputs`, one behind
    another, were written to it; and the whole."""
    part = all_gather_output.narrow(0, all_gather_input_numel * rank, all_gather_input_numel)
    with torch.no_grad():
        part.copy_(torch.cat([tensor.reshape(-1) for tensor in all_gather_inputs]))
    return part, all_gather_output


@ops.decomposition("fsdp::split_with_sizes_copy", whole=False)
def split_with_sizes_copy(all_gather_output, all_gather_input_split_sizes, dim=0, *, out):
    """torch.split_with_sizes_copy, written to `out`."""
    for target, part in zip(out, all_gather_output.split(all_gather_input_split_sizes, dim), strict=True):
        target.copy_(part)


@ops.decomposition("fsdp::chunk_cat", whole=False)
def chunk_cat(tensors, dim, num_chunks, *, out):
    """torch._chunk_cat, written to `out`."""
    out.copy_(torch._chunk_cat(tensors, dim, num_chunks))


@ops.decomposition("fsdp::copy_", whole=False)
def copy_(tensor, data):
    """`data` written to `tensor`."""
    tensor.copy_(data)
