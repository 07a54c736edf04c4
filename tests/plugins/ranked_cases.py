"""Cases that ask for their rank, and so run between processes only: lists of unequal parts, messages, groups, refusals."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collectives_cases import Case, Tensors, all_gather


def unequal(x: torch.Tensor, n: int) -> Tensors:
    """Rank r sends r + 1 rows to everyone, but none to the first."""
    rank = dist.get_rank()
    sent = [0] + [rank + 1] * (n - 1)
    received = [0] * n if rank == 0 else [r + 1 for r in range(n)]
    rows = torch.cat([x] * n)[: sum(sent)].contiguous()
    out = x.new_zeros(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, rows, received, sent)
    if x.device.type == "jax":
        from torchax_ops_c10d import ragged_all_to_all

        counts = torch.tensor(sent, device=x.device)
        padded, came = ragged_all_to_all(rows, counts, dist.group.WORLD, longest=n, rows=n * n)
        assert came.tolist() == received and padded[: len(out)].tolist() == out.tolist()
    return [out, funcol.wait_tensor(funcol.all_to_all_single(rows, received, sent, dist.group.WORLD))]


def different_shapes(x: torch.Tensor, n: int) -> Tensors:
    """Lists of tensors of r + 1 rows for rank r, which gloo does not take: what would come is written down."""
    rank = dist.get_rank()
    mine = x[:1].repeat(rank + 1, 1) * (rank + 1)
    gathered = [x.new_zeros(r + 1, x.shape[1]) for r in range(n)]
    summed, received = torch.zeros_like(mine), [x.new_zeros(r + 1, x.shape[1]) for r in range(n)]
    ones = [x.new_ones(r + 1, x.shape[1]) for r in range(n)]
    if x.device.type == "cpu":
        firsts = all_gather(x[:1].contiguous(), n)
        gathered = [first.repeat(r + 1, 1) * (r + 1) for r, first in enumerate(firsts)]
        return [*gathered, torch.full_like(mine, n), *gathered]
    dist.all_gather(gathered, mine)
    dist.reduce_scatter(summed, ones)
    dist.all_to_all(received, [mine] * n)
    return [*gathered, summed, *received]


def refusals(x: torch.Tensor, n: int) -> Tensors:
    """What raises on device "jax" between processes, on every rank."""
    if x.device.type == "cpu":
        return []
    import jax

    import torchax_core
    from torchax_core import interop

    rank = dist.get_rank()
    for refused, words in (
        (
            lambda t: dist.all_reduce(t) if rank else dist.broadcast(t, 0),
            r"rank [1-9] (has traced )?1 collectives: psum",
        ),
        (lambda t: dist.send(t, 1) if rank == 0 else dist.recv(t, 0), "permute_tensor, which says all pairs"),
    ):
        try:
            torchax_core.jit(refused)(x.clone())
        except RuntimeError as error:
            assert re.search(words, str(error)), error
        else:
            raise AssertionError(f"ran: {words}")
    try:
        jax.jit(interop.jax_view(dist.all_reduce))(x.jax())
    except RuntimeError as error:
        assert "not of one under jax's own jit" in str(error), error
    else:
        raise AssertionError("ran under jax.jit, whose program is one process's own")
    assert as_one_program(n) == [n * (n - 1) / 2]
    try:
        # everyone sends one row to rank 0, and expects two from it
        dist.all_to_all_single(x.new_zeros(n + 1, 3), x[:n], [2] + [1] * (n - 1), [1] * n)
    except RuntimeError as error:
        assert "they send" in str(error)
    else:
        raise AssertionError("splits that do not agree were taken")
    return []


def as_one_program(n: int) -> list[float]:
    """What the refusal advises: a collective in a program over all processes' devices."""
    import jax

    import torchax_core
    from torchax_core import distributed, interop
    from torchax_ops_c10d import map_group

    mesh = jax.make_mesh((n,), ("everyone",), devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,))
    map_group("everyone, in one program", "everyone")
    whole = distributed.distribute_tensor(torch.arange(float(n)), mesh, jax.P("everyone"))
    options = {"mesh": mesh, "in_specs": jax.P("everyone"), "out_specs": jax.P("everyone"), "check_vma": False}
    program = interop.jax_shard_map(lambda t: funcol.all_reduce(t, "sum", "everyone, in one program"), options)
    return distributed.local_shards(torchax_core.jit(program)(whole))[0].tensor.tolist()


def permute(x: torch.Tensor, n: int) -> Tensors:
    return [funcol.wait_tensor(funcol.permute_tensor(x.flatten(), [(i + 1) % n for i in range(n)], dist.group.WORLD))]


def send_and_receive(x: torch.Tensor, n: int) -> Tensors:
    """Everyone to rank 0, which answers; tags tell two messages apart."""
    rank, out = dist.get_rank(), torch.zeros_like(x)
    if rank:
        dist.send(x, 0)
        dist.recv(out, 0, tag=1)
        return [out]
    total = x.clone()
    for source in range(1, n):
        dist.recv(out, source)
        total += out
    for work in [dist.isend(total, to, tag=1) for to in range(1, n)]:
        work.wait()
    return [total]


def receive_from_any(x: torch.Tensor, n: int) -> Tensors:
    rank, out = dist.get_rank(), torch.zeros_like(x)
    if rank == n - 1:
        dist.send(x, 0)
    if rank == 0:
        assert dist.recv(out) == n - 1
    dist.barrier()
    return [out]


def objects(x: torch.Tensor, n: int) -> Tensors:
    rank = dist.get_rank()
    gathered: list[object] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(n)]
    several = [rank, "text"]
    dist.broadcast_object_list(several, n - 1)
    assert several == [n - 1, "text"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]
    return []


def subgroups(x: torch.Tensor, n: int) -> Tensors:
    rank = dist.get_rank()
    halves = [dist.new_group(list(range(n // 2))), dist.new_group(list(range(n // 2, n)))]
    mine = halves[rank >= n // 2]
    x = x.clone()
    dist.all_reduce(x, group=mine)
    everyone = dist.new_group()
    y = x.clone()
    dist.broadcast(y, n - 1, group=everyone)
    assert dist.get_world_size(mine) == n // 2
    return [x, y]


def ranked_cases(dtype: torch.dtype | None, full: bool) -> list[Case]:
    """Those of a dtype; or, of None, those that run once."""
    if dtype is None:
        single = torch.float32
        return [
            Case("lists of different shapes", single, different_shapes, ranked=True),
            Case("refusals", single, refusals, ranked=True),
            Case("recv from any", single, receive_from_any, ranked=True, root=0),
            Case("objects", single, objects, ranked=True),
            Case("new_group", single, subgroups, ranked=True),
        ]
    bodies = {"all_to_all_single, unequal": unequal, "funcol.permute_tensor": permute, "send, recv": send_and_receive}
    return [
        Case(name, dtype, body, ranked=True)
        for name, body in bodies.items()
        if dtype == torch.float64 or full and (dtype != torch.bool or name != "send, recv")  # the last one adds
    ]
