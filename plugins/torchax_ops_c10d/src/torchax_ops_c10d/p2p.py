"""Sends and receives.

Between two processes they go through host memory and torch's gloo backend: of any shape, in any order. XLA's own
point-to-point, ppermute, is a program that both sides must run in one order with all their others; a receive from any source,
or two members that each send before they receive, cannot be written in it.

Inside jax.shard_map every device runs the program of rank 0. A batch in which that rank sends to k and receives from -k, modulo
the number of members, is read as "each member to the one k further on", and is a ppermute. Nothing else is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchax_core.tensor import active
from torchax_ops_c10d import eager, groups, spmd
from torchax_ops_c10d.groups import CollectiveError
from torchax_ops_c10d.members import Members, members_of

__all__ = ["connect", "disconnect", "host_of", "permute_tensor", "point_to_point", "receive", "send", "shift"]

# by group name: the gloo backend of the same processes
_hosts: dict[str, Any] = {}
# by group name: the sends and receives inside jax.shard_map that nobody has waited for yet
_open: dict[str, list[_Stated]] = {}


def connect(options: Any) -> None:
    """Let the members of a group of processes reach each other. Called by all of them."""
    store = dist.PrefixStore("host", options.store)
    _hosts[options.group_id] = dist.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )


def host_of(name: str) -> Any:
    """The gloo backend of a group of processes; of one process, one that is made now."""
    gloo = _hosts.get(name)
    if gloo is None:
        gloo = _hosts[name] = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    return gloo


def disconnect(name: str) -> None:
    """Forget a group."""
    _hosts.pop(name, None)


def send(op: str, group: Any, tensor: torch.Tensor, receiver: int, tag: int) -> Any:
    """A Work that is done when the tensor may be written to again."""
    gloo = _host(op, group)
    if gloo is None:
        return _Stated(group, eager.array_of(tensor), receiver, None)
    value = tensor.detach().cpu().contiguous()
    return _Transfer(gloo.send([value], receiver, tag), value, None)


def receive(op: str, group: Any, tensor: torch.Tensor, sender: int | None, tag: int) -> Any:
    """A Work whose `wait` writes what the member `sender` (None: any) sends to the tensor."""
    gloo = _host(op, group)
    if gloo is None:
        if sender is None:
            raise point_to_point(op)
        return _Stated(group, None, sender, tensor)
    value = torch.empty(tensor.shape, dtype=tensor.dtype)
    work = gloo.recv_anysource([value], tag) if sender is None else gloo.recv([value], sender, tag)
    return _Transfer(work, value, tensor)


def shift(
    op: str,
    members: Members,
    sends: Sequence[tuple[Any, int]],
    receives: Sequence[tuple[Sequence[int], int]],
) -> list[Any]:
    """What the members of a jax.shard_map receive, for each receive of a batch. Raises CollectiveError if it is no shift.

    sends: array and receiver; receives: shape and sender; the i-th of either are one shift.
    """
    size = members.size
    stated = len(sends) == len(receives) and all(
        (to + source) % size == 0 and (2 * to != size or size == 2) and tuple(array.shape) == tuple(shape)
        for (array, to), (shape, source) in zip(sends, receives, strict=False)
    )
    if not stated:
        raise CollectiveError(
            f"{op}: inside jax.shard_map every device runs the program of rank 0, and a batch is understood if each of its "
            f"sends, to k, comes with a receive of the same shape from {size} - k, where k is not {size} / 2. This one sends to "
            f"{[to for _, to in sends]} and receives from {[source for _, source in receives]}. Use "
            "torchax_ops_c10d.permute_tensor, which says all pairs of sender and receiver."
        )
    return [
        members.run(spmd.permute, array, pairs=tuple((i, (i + to) % size) for i in range(size))) for array, to in sends
    ]


def permute_tensor(tensor: torch.Tensor, src_dst: Sequence[int], group: Any) -> torch.Tensor:
    """Every member's tensor, moved to another: that of member i to member src_dst[i]. Differentiable.

    tensor:  one shape on all members; returned is what this one receives.
    src_dst: a permutation of the members, the same on all.
    group:   a process group or its name (see map_group).
    Raises CollectiveError if it is no permutation. torch's own permute_tensor, of _functional_collectives, needs a rank
    that differs from member to member, and so works between processes only.
    """
    if sorted(src_dst) != list(range(len(src_dst))):
        raise CollectiveError(
            f"permute_tensor: `src_dst` must be a permutation of the members, but is {list(src_dst)}."
        )
    return _Permute.apply(tensor, tuple(src_dst), group)  # type: ignore[no-any-return,no-untyped-call]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, src_dst: tuple[int, ...], group: Any) -> torch.Tensor:
        ctx.back = tuple(src_dst.index(i) for i in range(len(src_dst)))
        ctx.group = group
        members = members_of("permute_tensor", group, len(src_dst))
        result = members.run(spmd.permute, eager.array_of(tensor), pairs=tuple(enumerate(src_dst)))
        return eager.tensor_of(result, tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return permute_tensor(gradients[0], ctx.back, ctx.group), None, None


def point_to_point(op: str) -> CollectiveError:
    """What to say of a send or a receive that is not between processes."""
    return CollectiveError(
        f"{op}: inside jax.shard_map device 'jax' has no point-to-point communication, as every device runs the same program. "
        "Use torchax_ops_c10d.permute_tensor (a ppermute), which says all pairs of sender and receiver at once. Between "
        "processes, send and receive in a group of torch.distributed.init_process_group('jax')."
    )


def _host(op: str, group: Any) -> Any:
    """The gloo backend of a group of processes; None where an axis is in scope."""
    if groups.axis_of(op, group, elsewhere=True) is not None:
        return None
    gloo = _hosts.get(groups.name_of(group))
    if gloo is None:
        raise point_to_point(op)
    if active.trace is not None:
        raise CollectiveError(
            f"{op}: a message between two processes cannot be part of a jitted function, which all of them run as one program. "
            "Use torchax_ops_c10d.permute_tensor, which says all pairs of sender and receiver at once, or send outside."
        )
    return gloo


# Works that have not been waited for: torch holds their C++ half only, which alone waits for ever.
_kept: set[Any] = set()


class _Transfer(dist.Work):
    """A send or a receive."""

    def __init__(self, work: Any, value: torch.Tensor, target: torch.Tensor | None) -> None:
        super().__init__()
        self._work = work
        self._value = value
        self._target = target
        _kept.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if timeout:
            self._work.wait(timeout)
        else:
            self._work.wait()
        if self._target is not None:
            eager.write(self._target, self._value.to("jax").jax())
            self._target = None
        _kept.discard(self)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


class _Stated(dist.Work):
    """A send or a receive inside jax.shard_map. Waiting for one does all that were stated up to then."""

    def __init__(self, group: Any, sent: Any, peer: int, target: torch.Tensor | None) -> None:
        super().__init__()
        self._group = groups.name_of(group)
        self.sent = sent
        self.peer = peer
        self.target = target
        _open.setdefault(self._group, []).append(self)
        _kept.add(self)

    def wait(self, timeout: Any = None) -> bool:
        stated = _open.get(self._group, [])
        if self in stated:
            del _open[self._group]
            _kept.difference_update(stated)
            sends = [(work.sent, work.peer) for work in stated if work.target is None]
            targets = [work for work in stated if work.target is not None]
            members = members_of("batch_isend_irecv", self._group)
            results = shift("batch_isend_irecv", members, sends, [(w.target.shape, w.peer) for w in targets])  # type: ignore[union-attr]
            for work, result in zip(targets, results, strict=True):
                eager.write(work.target, result)  # type: ignore[arg-type]
        return True

    def is_completed(self) -> bool:
        return self not in _open.get(self._group, [])
