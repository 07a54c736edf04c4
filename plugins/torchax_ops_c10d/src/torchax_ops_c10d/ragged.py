"""all_to_all of parts that differ in length from member to member, also inside jax.shard_map: padded to bounds that all know.

JAX's own ragged_all_to_all is not lowered on CPUs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from torchax_core.errors import ShapeError
from torchax_ops_c10d import eager, spmd
from torchax_ops_c10d.members import members_of, wide

__all__ = ["ragged_all_to_all"]


def ragged_all_to_all(
    tensor: torch.Tensor, counts: torch.Tensor, group: Any, *, longest: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `tensor`, one part behind another, each to its member; the rows received, joined, and how many from each member.

    tensor:  (n, ...): the first counts[0] rows go to member 0, the next counts[1] to member 1; rows left over go nowhere.
    counts:  (members,), integers on device "jax": other ones on every member, and known only when the program runs.
    group:   a process group or its name (see map_group). Works inside jax.shard_map and between processes.
    longest: a bound on all counts, the same on all members; rows: one on the rows that this member receives. Rows beyond these
             bounds are lost.
    returns: (rows, ...), zeros behind the last row received, with gradients; and (members,) int32.
    Raises ShapeError unless there is one count for each member.
    """
    members = members_of("ragged_all_to_all", group)
    if tuple(counts.shape) != (members.size,):
        raise ShapeError(
            f"ragged_all_to_all: `counts` must have one number of rows for each of the {members.size} members, but its shape is "
            f"{tuple(counts.shape)}."
        )
    return _Ragged.apply(tensor, counts, group, longest, rows)  # type: ignore[no-any-return,no-untyped-call]


class _Ragged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: torch.Tensor, group: Any, longest: int, rows: int) -> Any:
        members = members_of("ragged_all_to_all", group)
        # between processes, `tensor` and `rows` may differ: what all run as one program are the exchanges alone
        with wide():
            x, sent = eager.array_of(tensor), eager.array_of(counts).astype(jnp.int32)
            starts = jnp.cumsum(sent, dtype=jnp.int32) - sent
            within = jnp.arange(longest, dtype=jnp.int32)
            if x.shape[0]:
                parts = jnp.take(x, starts[:, None] + within, axis=0, mode="clip")
            else:
                parts = jnp.zeros((members.size, longest, *x.shape[1:]), x.dtype)
        parts, received = members.run(spmd.exchange_all, [parts, sent])
        with wide():
            # each row that was received to its place; those that only fill a part up have none
            places = (jnp.cumsum(received, dtype=jnp.int32) - received)[:, None] + within
            places = jnp.where(within < received[:, None], places, rows)
            result = jnp.zeros((rows, *x.shape[1:]), x.dtype).at[places].set(parts, mode="drop")
        result = eager.tensor_of(result, (rows, *tensor.shape[1:]))
        received = eager.tensor_of(received, (members.size,))
        ctx.group, ctx.bounds = group, (longest, tensor.shape[0])
        ctx.save_for_backward(received)
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        longest, rows = ctx.bounds
        (received,) = ctx.saved_tensors
        back, _ = ragged_all_to_all(gradients[0], received, ctx.group, longest=longest, rows=rows)
        return back, None, None, None, None
