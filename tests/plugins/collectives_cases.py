"""Collectives as cases: torch.distributed code that runs under gloo on the CPU and on device "jax", to be compared.

A case's body takes this rank's tensors and returns tensors. It does not ask for its rank: inside jax.shard_map all devices
run one program. Those that do are `ranked`, and run between processes only.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager

warnings.filterwarnings("ignore", category=FutureWarning)  # 2.14 renames all_gather_into_tensor and others

Tensors = list[torch.Tensor]
FACTOR = 3.0
REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")
ROUNDED = 1e-4
HALF_SUMS = 2**-8
"""Of bfloat16: what is summed in it depends on the order of the ranks by its last bit."""
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int32, torch.int64, torch.int8, torch.uint8)
FEW = (torch.float32, torch.int64, torch.bool)
DTYPES = (*FLOATS, *WHOLE, torch.bool, torch.complex64)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. rows: the length of dimension 0, for each member; root: the only rank whose result is defined.

    rounded: how far apart results may be, relative to them; 0 compares bit for bit.
    """

    name: str
    dtype: torch.dtype
    body: Callable[[torch.Tensor, int], Tensors]
    reduction: str | None = None
    rows: int = 2
    shape: tuple[int, ...] = (3,)
    root: int | None = None
    ranked: bool = False
    scalar: bool = False
    rounded: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.name} {self.reduction or ''} {str(self.dtype).removeprefix('torch.')}"

    def input(self, rank: int, members: int) -> torch.Tensor:
        """What the rank holds: small whole numbers, so that no result is rounded."""
        generator = torch.Generator().manual_seed(rank)
        shape = () if self.scalar else (self.rows * members, *self.shape)
        values = torch.randint(1, 4, shape, generator=generator)
        if self.dtype == torch.int64:
            return values + 2**33  # more than 32 bits hold
        if self.dtype == torch.float64 and self.reduction != "product":
            return values.double() + 2.0**-30
        if self.dtype.is_complex:
            return torch.complex(values.float(), torch.full(shape, rank + 1.0))
        return (values > 2) if self.dtype == torch.bool else values.to(self.dtype)


def reduce_op(name: str) -> object:
    """torch.distributed's object for a reduction."""
    if name == "premul_sum":
        return torch._C._distributed_c10d._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, name.upper())


def defined(reduction: str, inputs: torch.Tensor) -> torch.Tensor:
    """The reduction of (members, ...), for what gloo does not have: as NCCL has it."""
    if inputs.dtype == torch.bool:
        name = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(reduction, reduction)
        return defined(name, inputs.to(torch.int32)).to(torch.bool)
    terms = list(inputs)
    match reduction:
        case "avg":
            total = defined("sum", inputs)
            whole = not (total.is_floating_point() or total.is_complex())
            return torch.div(total, len(terms), rounding_mode="trunc" if whole else None)
        case "premul_sum":
            return defined("sum", (inputs.double() * FACTOR).to(inputs.dtype))
        case _:
            binary = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
            binary |= {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
            return functools.reduce(binary[reduction], terms)


# -- bodies --------------------------------------------------------------------------------------


def all_reduce(reduction: str, x: torch.Tensor, n: int) -> Tensors:
    x = x.clone()
    dist.all_reduce(x, reduce_op(reduction))
    return [x]


def reduce(reduction: str, root: int, x: torch.Tensor, n: int) -> Tensors:
    x = x.clone()
    dist.reduce(x, root, reduce_op(reduction))
    return [x]


def reduce_scatter(reduction: str, x: torch.Tensor, n: int) -> Tensors:
    out = torch.zeros_like(x[: len(x) // n])
    dist.reduce_scatter(out, list(x.chunk(n)), reduce_op(reduction))
    return [out]


def reduce_scatter_tensor(reduction: str, x: torch.Tensor, n: int) -> Tensors:
    joined, stacked = torch.zeros_like(x[: len(x) // n]), torch.zeros_like(x[: len(x) // n])
    dist.reduce_scatter_tensor(joined, x, reduce_op(reduction))
    dist.reduce_scatter_tensor(stacked, x.reshape(n, -1, *x.shape[1:]), reduce_op(reduction))
    return [joined, stacked]


def functional_all_reduce(reduction: str, x: torch.Tensor, n: int) -> Tensors:
    return [funcol.wait_tensor(funcol.all_reduce(x, reduction, dist.group.WORLD))]


def functional_reduce_scatter(reduction: str, x: torch.Tensor, n: int) -> Tensors:
    return [funcol.wait_tensor(funcol.reduce_scatter_tensor(x, reduction, 0, dist.group.WORLD))]


def asynchronous(x: torch.Tensor, n: int) -> Tensors:
    a, b = x.clone(), torch.cat([torch.zeros_like(x)] * n)
    works = [dist.all_reduce(a, async_op=True), dist.all_gather_into_tensor(b, x, async_op=True)]
    for work in works:
        assert work is not None and work.wait()
    assert all(work.is_completed() for work in works)
    return [a, b]


def coalesced(x: torch.Tensor, n: int) -> Tensors:
    a, b, c, d = x.clone(), x[0].clone(), torch.cat([torch.zeros_like(x)] * n), torch.zeros_like(x[: len(x) // n])
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(c, x)
    manager.wait()
    with _coalescing_manager():
        dist.reduce_scatter_tensor(d, x)
    return [a, b, c, d]


def all_gather(x: torch.Tensor, n: int) -> Tensors:
    out = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(out, x)
    return out


def all_gather_into_tensor(x: torch.Tensor, n: int) -> Tensors:
    joined = torch.cat([torch.zeros_like(x)] * n)
    stacked = torch.stack([torch.zeros_like(x)] * n)
    dist.all_gather_into_tensor(joined, x)
    if x.device.type == "cpu":  # gloo takes the joined form only
        stacked.copy_(joined.view(stacked.shape))
    else:
        dist.all_gather_into_tensor(stacked, x)
    return [joined, stacked]


def broadcast(x: torch.Tensor, n: int) -> Tensors:
    x = x.clone()
    dist.broadcast(x, n - 1)
    return [x]


def scatter(x: torch.Tensor, n: int) -> Tensors:
    out = torch.zeros_like(x[: len(x) // n])
    dist.scatter(out, list(x.chunk(n)) if dist.get_rank() == 0 else None, 0)
    return [out]


def gather(x: torch.Tensor, n: int) -> Tensors:
    out = [torch.zeros_like(x) for _ in range(n)] if dist.get_rank() == 0 else None
    dist.gather(x, out, 0)
    return out or []


def all_to_all(x: torch.Tensor, n: int) -> Tensors:
    out = [torch.zeros_like(part) for part in x.chunk(n)]
    dist.all_to_all(out, list(x.contiguous().chunk(n)))
    return out


def all_to_all_single(x: torch.Tensor, n: int) -> Tensors:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    return [out]


def shift(x: torch.Tensor, n: int) -> Tensors:
    rank = dist.get_rank()
    out = torch.zeros_like(x)
    to, source = (rank + 1) % n, (rank - 1) % n
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    return [out]


def barrier(x: torch.Tensor, n: int) -> Tensors:
    dist.barrier()
    return [x.clone()]


def functional(x: torch.Tensor, n: int) -> Tensors:
    group = dist.group.WORLD
    return [
        funcol.wait_tensor(y)
        for y in (
            funcol.all_gather_tensor(x, 0, group),
            funcol.all_gather_tensor(x, 1, group),
            funcol.all_to_all_single(x, None, None, group),
            funcol.broadcast(x, n - 1, group),
            *funcol.all_reduce_coalesced([x, x[0]], "sum", group),
            *funcol.all_gather_into_tensor_coalesced([x, x[:1]], group),
            *funcol.reduce_scatter_tensor_coalesced([x, x + x], "sum", [0, 0], group),
        )
    ]


def gradients(x: torch.Tensor, n: int) -> Tensors:
    group = dist.group.WORLD
    collectives = (
        lambda t: funcol.all_reduce(t, "sum", group),
        lambda t: funcol.all_gather_tensor_autograd(t, 0, group),
        lambda t: funcol.reduce_scatter_tensor_autograd(t, "sum", 0, group),
        lambda t: funcol.all_to_all_single_autograd(t, None, None, group),
    )
    out = []
    for collective in collectives:
        t = x.clone().requires_grad_()
        result = collective(t * t)
        (result * torch.arange(result.numel(), device=x.device, dtype=x.dtype).view(result.shape)).sum().backward()
        out.append(t.grad)
    return out


def cases(full: bool) -> list[Case]:
    """All of them, or those that the tests run: every op, reduction and dtype once, and few combinations."""
    from ranked_cases import ranked_cases
    from training_cases import training

    found: list[Case] = []
    reducing = {
        "all_reduce": all_reduce,
        "reduce": functools.partial,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_tensor": reduce_scatter_tensor,
        "funcol.all_reduce": functional_all_reduce,
        "funcol.reduce_scatter_tensor": functional_reduce_scatter,
    }
    for name, body in reducing.items():
        for reduction in REDUCTIONS:
            if reduction == "premul_sum" and (name.startswith("funcol") or torch.__version__ < (2, 14)):
                continue  # a name alone has no factor; and before 2.14, the factor is out of Python's reach
            for dtype in DTYPES:
                whole = not (dtype.is_floating_point or dtype.is_complex)
                if reduction.startswith("b") and not whole or dtype.is_complex and reduction not in ("sum", "avg"):
                    continue
                if dtype == torch.bool and reduction in ("avg", "premul_sum"):
                    continue
                usual = torch.int32 if reduction.startswith("b") else torch.float32
                if not full and dtype != usual and (name != "all_reduce" or reduction != "sum"):
                    if dtype != torch.int64 or "all_reduce" != name != "reduce_scatter_tensor":
                        continue
                if full and "_tensor" not in name and name != "all_reduce" and dtype not in FEW:
                    continue
                if not full and "_" not in name and reduction not in ("sum", "max"):
                    continue  # reduce is all_reduce, kept by one
                if name == "reduce":
                    for root in (0, 1):
                        found.append(
                            Case(
                                f"reduce to {root}",
                                dtype,
                                functools.partial(reduce, reduction, root),
                                reduction,
                                root=root,
                            )
                        )
                else:
                    found.append(Case(name, dtype, functools.partial(body, reduction), reduction))
    moving: dict[str, Callable[[torch.Tensor, int], Tensors]] = {
        "all_gather": all_gather,
        "all_gather_into_tensor": all_gather_into_tensor,
        "broadcast": broadcast,
        "scatter": scatter,
        "gather": gather,
        "all_to_all": all_to_all,
        "all_to_all_single": all_to_all_single,
        "batch_isend_irecv": shift,
        "funcol": functional,
    }
    for dtype in DTYPES if full else (torch.float64, torch.bool):
        for name, body in moving.items():
            if name == "funcol" and dtype == torch.bool:
                continue  # it sums
            found.append(Case(name, dtype, body, root=0 if name == "gather" else None))
        found += ranked_cases(dtype, full)
    single = torch.float32
    found += [
        Case("all_reduce of a scalar", single, functools.partial(all_reduce, "sum"), "sum", scalar=True),
        Case("all_gather of a scalar", single, all_gather, scalar=True),
        Case("broadcast of a scalar", single, broadcast, scalar=True),
        Case("all_reduce of nothing", single, functools.partial(all_reduce, "sum"), "sum", rows=0),
        Case("all_gather of nothing", single, all_gather, rows=0),
        Case("async_op", single, asynchronous),
        Case("coalescing manager", single, coalesced),
        Case("barrier", single, barrier),
        Case("funcol gradients", single, gradients),
    ]
    return found + ranked_cases(None, full) + training(full)
