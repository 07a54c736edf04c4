"""torch.distributed's collectives on tensors of device "jax": read arrays, run among the members, write the results.

Lists of a collective hold one tensor for each member. Of unequal shapes they travel flat, padded to the longest; between
processes only, as the devices of a jax.shard_map run one program, in which a shape cannot differ from member to member.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax_core.errors import ShapeError
from torchax_core.interop import jax_view, torch_view
from torchax_core.tensor import active
from torchax_ops_c10d import spmd
from torchax_ops_c10d.groups import CollectiveError
from torchax_ops_c10d.members import Members, wide

__all__ = [
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "all_to_all_list",
    "array_of",
    "broadcast",
    "check_reduction",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "scatter",
    "tensor_of",
    "write",
]


def array_of(tensor: torch.Tensor) -> jax.Array:
    """The tensor's array. Raises ConversionError if it is on another device."""
    return jax_view(tensor)  # type: ignore[no-any-return]


def tensor_of(array: jax.Array, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of the array, in that shape."""
    return torch_view(array if array.shape == shape else array.reshape(tuple(shape)))  # type: ignore[no-any-return]


def write(tensor: torch.Tensor, array: jax.Array) -> None:
    """Put the array's elements into the tensor. Raises ShapeError if it has another number of them."""
    if array.size != tensor.numel():
        raise ShapeError(
            f"a collective's result has {array.size} elements, but the tensor to write it to has {tensor.numel()}, in the shape "
            f"{tuple(tensor.shape)}."
        )
    if active.trace is not None and tensor.requires_grad:
        active.trace.torch_only.add("a collective that writes to a tensor with gradients")
    with torch.no_grad():
        tensor.copy_(tensor_of(array, tensor.shape))


def check_reduction(op: str, reduction: str, dtype: torch.dtype, factor: float | None = None) -> None:
    """Raises CollectiveError for a reduction torch does not have, or that has no meaning for the dtype."""
    if reduction not in spmd.REDUCTIONS:
        raise CollectiveError(f"{op}: `reduce_op` must be one of {', '.join(spmd.REDUCTIONS)}, but is {reduction!r}.")
    if reduction == "premul_sum" and factor is None:
        raise CollectiveError(
            f"{op}: `premul_sum` comes with a factor, which this op has no argument for. Multiply the tensor, and use 'sum'."
        )
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (reduction.startswith("b") and not whole) or (dtype == torch.bool and reduction in ("avg", "premul_sum")):
        raise CollectiveError(
            f"{op}: the reduction {reduction!r} is not defined for {dtype}. Convert the tensor first."
        )


# -- one shape on all members --------------------------------------------------------------------


def all_reduce(
    op: str, members: Members, tensors: Sequence[torch.Tensor], reduction: str, factor: float | None = None
) -> list[jax.Array]:
    """The reduction of each tensor, all in one program."""
    for tensor in tensors:
        check_reduction(op, reduction, tensor.dtype, factor)
    arrays = [array_of(t) for t in tensors]
    return members.run(spmd.reduce_all, arrays, reduction=reduction, factor=factor)  # type: ignore[no-any-return]


def reduce(op: str, members: Members, tensor: torch.Tensor, root: int, reduction: str, factor: float | None) -> None:
    """The reduction, written on the member `root` only."""
    check_source(op, members, root)
    (result,) = all_reduce(op, members, [tensor], reduction, factor)
    if members.rank is None:
        here = jax.lax.axis_index(members.axis) == root  # type: ignore[attr-defined]
        with wide():
            result = jnp.where(here, result.reshape(tuple(tensor.shape)), array_of(tensor))
    if members.rank in (None, root):
        write(tensor, result)


def broadcast(op: str, members: Members, tensor: torch.Tensor, source: int) -> jax.Array:
    """The tensor of the member `source`."""
    check_source(op, members, source)
    return members.run(spmd.broadcast, array_of(tensor), source=source)  # type: ignore[no-any-return]


def all_gather(members: Members, tensor: torch.Tensor) -> jax.Array:
    """Every member's tensor: (members, *its shape)."""
    return members.run(spmd.gather, array_of(tensor)).reshape(members.size, *tensor.shape)  # type: ignore[no-any-return]


def reduce_scatter(
    op: str, members: Members, tensor: torch.Tensor, reduction: str, factor: float | None = None
) -> jax.Array:
    """The reduction of this member's share of dimension 0: (n, ...) -> (n / members, ...)."""
    check_reduction(op, reduction, tensor.dtype, factor)
    parts = _parts(op, array_of(tensor), members.size)
    return members.run(spmd.reduce_scatter, parts, reduction=reduction, factor=factor)  # type: ignore[no-any-return]


def _parts(op: str, array: jax.Array, members: int) -> jax.Array:
    """Dimension 0 as (members, the rest of it)."""
    if array.ndim == 0 or array.shape[0] % members:
        raise ShapeError(
            f"{op}: the first dimension of `input` must divide into {members} parts, but input.shape={array.shape}. Pad it."
        )
    return array.reshape(members, array.shape[0] // members, *array.shape[1:])


def check_source(op: str, members: Members, rank: int) -> None:
    """Raises CollectiveError for a rank that no member of the group has."""
    if not 0 <= rank < members.size:
        raise CollectiveError(
            f"{op}: `src` must be a member of the group, 0 to {members.size - 1}, but is {rank}: its rank within the group."
        )


# -- lists of tensors ----------------------------------------------------------------------------


def all_gather_list(op: str, members: Members, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Every member's tensor, written to one of `outputs` each."""
    _check_count(op, "output_tensors", outputs, members)
    if _same(op, members, outputs):
        _write_each(outputs, all_gather(members, tensor))
    else:
        longest = max(t.numel() for t in outputs)
        _write_each(outputs, members.run(spmd.gather, _padded(array_of(tensor), longest)))


def gather(op: str, members: Members, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    """Every member's tensor, written to `outputs` on the member `root`, the only one that has them."""
    check_source(op, members, root)
    if members.rank is None and not outputs:
        raise _root_only(op, "gather_list", root)
    result = all_gather(members, tensor)
    if members.rank in (None, root):
        _check_count(op, "gather_list", outputs, members)
        _same(op, members, outputs)
        _write_each(outputs, result)


def scatter(op: str, members: Members, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> None:
    """This member's of the `tensors` that the member `root` has, written to `output`."""
    check_source(op, members, root)
    if tensors:
        _check_count(op, "scatter_list", tensors, members)
        if any(t.shape != output.shape or t.dtype != output.dtype for t in tensors):
            raise ShapeError(
                f"{op}: all of `scatter_list` must be as `tensor`, {output.dtype} of shape {tuple(output.shape)}, but they "
                f"are {[(str(t.dtype), tuple(t.shape)) for t in tensors]}."
            )
        parts = _stacked([array_of(t) for t in tensors])
    elif members.rank is None:
        raise _root_only(op, "scatter_list", root)
    else:
        parts = _stacked([array_of(output)] * members.size)  # of the right shape; not read
    write(output, members.run(spmd.scatter, parts, source=root))


def reduce_scatter_list(
    op: str,
    members: Members,
    output: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    reduction: str,
    factor: float | None = None,
) -> None:
    """The reduction of this member's of the `tensors`, written to `output`."""
    _check_count(op, "input_tensors", tensors, members)
    check_reduction(op, reduction, output.dtype, factor)
    if _same(op, members, tensors):
        parts = _stacked([array_of(t) for t in tensors])
    else:
        longest = max(t.numel() for t in tensors)
        parts = _stacked([_padded(array_of(t), longest) for t in tensors])
    result = members.run(spmd.reduce_scatter, parts, reduction=reduction, factor=factor)
    write(output, result.reshape(-1)[: output.numel()])


def all_to_all_list(
    op: str, members: Members, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """`tensors[i]` goes to member i; what comes from it is written to `outputs[i]`."""
    _check_count(op, "output_tensors", outputs, members)
    _check_count(op, "input_tensors", tensors, members)
    arrays = [array_of(t) for t in tensors]
    if members.rank is None:
        _same(op, members, [*tensors, *outputs])
        _write_each(outputs, members.run(spmd.exchange, _stacked(arrays)))
        return
    with wide():
        elements = jnp.concatenate([a.reshape(-1) for a in arrays])
    received = _exchange(op, members, elements, [a.size for a in arrays], [t.numel() for t in outputs])
    ends = np.cumsum([t.numel() for t in outputs])
    for output, end in zip(outputs, ends, strict=True):
        write(output, received[end - output.numel() : end])


def all_to_all(
    op: str,
    members: Members,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> jax.Array:
    """Rows of `tensor`, `input_splits[i]` of them, go to member i; the rows received are joined.

    No splits: equal parts. Raises ShapeError unless the splits add up; CollectiveError for unequal ones in a jax.shard_map.
    """
    array = array_of(tensor)
    size = members.size
    if not output_splits and not input_splits:
        parts = members.run(spmd.exchange, _parts(op, array, size))
        return parts.reshape(array.shape)  # type: ignore[no-any-return]
    even = [array.shape[0] // size] * size
    input_splits, output_splits = list(input_splits) or even, list(output_splits) or even
    if len(input_splits) != size or len(output_splits) != size or sum(input_splits) != array.shape[0]:
        raise ShapeError(
            f"{op}: splits must be one for each of the {size} members, and those of the input add up to its first dimension, "
            f"but input_split_sizes={input_splits}, output_split_sizes={output_splits} and input.shape={array.shape}."
        )
    if members.rank is None:
        if input_splits != even or output_splits != even:
            raise CollectiveError(
                f"{op}: all parts must have one size, as every device runs the same program, in which no shape differs from "
                f"member to member, but input_split_sizes={input_splits} and output_split_sizes={output_splits} for "
                f"input.shape={array.shape}. Use torchax_ops_c10d.ragged_all_to_all, whose splits are a tensor, or pad all "
                "parts to the largest; where whole tensors change places, torchax_ops_c10d.permute_tensor."
            )
        return members.run(spmd.exchange, _parts(op, array, size)).reshape(array.shape)  # type: ignore[no-any-return]
    return _exchange(op, members, array, input_splits, output_splits)


def _exchange(op: str, members: Members, array: jax.Array, sizes: Sequence[int], expected: Sequence[int]) -> jax.Array:
    """Rows of `array`, `sizes[i]` of them to process i; the rows received, `expected[i]` from process i, joined.

    No member knows what the others send to each other, and all must run one program: they first agree on the longest part.
    """
    if members.traced:
        told = members.tell(sizes)
        received, longest = [each[members.rank] for each in told], max(map(max, told))  # type: ignore[index]
    else:
        found, most = members.run(_agree, jnp.asarray(np.array(sizes, np.int32)))
        received, longest = found.tolist(), int(most[0])
    if received != list(expected):
        raise ShapeError(
            f"{op}: this rank, {members.rank}, expects {list(expected)} from the members, but they send {received}. "
            "One's output_split_sizes must be what the others' input_split_sizes say."
        )
    length = 1 << (longest - 1).bit_length() if longest else 0  # few lengths, and so few programs
    starts = np.cumsum([0, *sizes[:-1]])
    parts = _rows(array, starts[:, None] + np.arange(length))
    joined = members.run(spmd.exchange, parts).reshape(members.size * length, *array.shape[1:])
    return _rows(joined, np.concatenate([i * length + np.arange(n) for i, n in enumerate(expected)]))


def _rows(array: jax.Array, index: np.ndarray) -> jax.Array:
    """The rows of those numbers; beyond the last one any, as nobody reads them."""
    with wide():
        if array.shape[0] == 0:
            return jnp.zeros_like(array, shape=(*index.shape, *array.shape[1:]))
        return jnp.take(array, index.astype(np.int32), axis=0, mode="clip")


def _agree(counts: jax.Array, axis: spmd.Axis | None) -> tuple[jax.Array, jax.Array]:
    """How many rows every member sends to this one, and the most that any sends to any."""
    return spmd.exchange(counts, axis), spmd.reduce(counts.max(keepdims=True), "max", axis)


def _padded(array: jax.Array, length: int) -> jax.Array:
    flat = array.reshape(-1)
    with wide():
        return jnp.pad(flat, (0, length - flat.size))


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    with wide():
        return jnp.stack(arrays)


def _same(op: str, members: Members, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have one shape. Raises CollectiveError if not, inside a jax.shard_map."""
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) > 1 and members.rank is None:
        raise CollectiveError(
            f"{op}: inside jax.shard_map the tensors of a list must have one shape, as every device runs the same program, "
            f"but have {sorted(shapes)}. Pad them to the largest."
        )
    return len(shapes) == 1


def _check_count(op: str, name: str, tensors: Sequence[torch.Tensor], members: Members) -> None:
    if len(tensors) != members.size:
        raise ShapeError(
            f"{op}: `{name}` must have one tensor for each of the {members.size} members, but has {len(tensors)}."
        )


def _write_each(tensors: Sequence[torch.Tensor], results: jax.Array) -> None:
    """Row i of `results`, as far as it goes, to tensor i."""
    for tensor, result in zip(tensors, results, strict=True):
        write(tensor, result if result.shape == tensor.shape else result.reshape(-1)[: tensor.numel()])


def _root_only(op: str, name: str, root: int) -> CollectiveError:
    return CollectiveError(
        f"{op}: inside jax.shard_map every device runs the program of rank 0, which has no `{name}` for the root {root}. Make "
        "rank 0 the root."
    )
