"""Cases inside torchax_core.jit and torch.compile: several groups in a program, values that only some ranks have or know."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from collectives_cases import Tensors


def jitted(device: torch.device, fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """On device "jax", the function under torchax_core.jit: one program, with what the ranks send each other in it."""
    if device.type == "cpu":
        return fn
    import torchax_core

    return torchax_core.jit(fn)


def in_jit(x: torch.Tensor, n: int) -> Tensors:
    """Several groups in one program, rank-dependent values, gradients that leave it; and torch.compile."""
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh

    mesh, rank = init_device_mesh(x.device.type, (n // 2, 2), mesh_dim_names=("slow", "fast")), dist.get_rank()

    wait = funcol.wait_tensor

    def several(x: torch.Tensor) -> torch.Tensor:
        x, y = x * (rank + 1), x.clone()
        dist.all_reduce(y)
        parts = wait(funcol.all_gather_tensor(x + y, 0, mesh["fast"]))
        counts = wait(funcol.all_reduce((x > 1).int(), "sum", mesh["fast"]))
        parts = parts + (counts.sum() if rank else 1)
        unused = wait(funcol.all_reduce(parts, "max", mesh["fast"]))
        parts = (unused if rank else parts) + wait(funcol.all_reduce(parts, "sum", mesh["slow"]))
        return wait(funcol.reduce_scatter_tensor(parts, "sum", 0, mesh["fast"]))

    def differentiated(x: torch.Tensor) -> torch.Tensor:
        everyone = wait(funcol.all_gather_tensor_autograd(x * x, 0, dist.group.WORLD))
        return (everyone * torch.arange(float(len(everyone)), device=x.device)[:, None]).sum()

    run, found = jitted(x.device, several), []
    found += [run(x), run(x + 1)]
    leaf = x.clone().requires_grad_()
    found.append(jitted(x.device, differentiated)(leaf))
    found[-1].backward()
    compiled = several if x.device.type == "cpu" else torch.compile(several, backend="torchax")
    return [*found, leaf.grad, compiled(x)]


def constants(x: torch.Tensor, n: int) -> Tensors:
    """What is sent is this rank's own, and known while tracing: XLA must not take it for everybody's.

    Each is a program of its own: XLA knows nothing of what waits for another collective.
    """
    import torch.distributed._functional_collectives as funcol

    rank, group, wait = dist.get_rank(), dist.group.WORLD, funcol.wait_tensor

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, rank + 1, dtype=dtype, device=x.device)

    def loop(x: torch.Tensor) -> torch.Tensor:
        def body(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, y + wait(funcol.all_reduce(full(3), "sum", group)) * wait(
                funcol.all_gather_tensor(full(1), 0, group)
            ).sum()

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        if x.device.type == "cpu":
            return body(start, body(start, x)[1])[1]
        return torch._higher_order_ops.while_loop(lambda i, y: i < 2, body, (start, x))[1]

    programs: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: wait(funcol.all_reduce(full(2), "sum", group)),
        lambda x: wait(funcol.all_reduce(full(dtype=torch.int64), "sum", group)),
        lambda x: wait(funcol.all_reduce(x if rank else torch.zeros_like(x), "max", group)),
        lambda x: wait(funcol.all_gather_tensor(full(2), 0, group)),
        lambda x: wait(funcol.reduce_scatter_tensor(full(n), "sum", 0, group)),
        loop,
    ]
    return [jitted(x.device, program)(x) for program in programs]
