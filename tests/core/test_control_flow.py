"""torch.cond, while_loop, scan and map: as on the CPU, eager and jitted, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as torch_map
from torch.testing import assert_close

import torchax_core


def _sine_or_cosine(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 1, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


def _two_results(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 1, lambda x: (x + 1, x.sum()), lambda x: (x - 1, x.prod()), (x,))


def _doubled_until_large(x: torch.Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x: (i < 10) & (x.sum() < 100), lambda i, x: (i + 1, x * 2), (start, x))


def _running_sum(x: torch.Tensor) -> Any:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)


def _product_so_far(x: torch.Tensor) -> Any:
    return associative_scan(lambda a, b: a * b, x, dim=0, combine_mode="generic")


def _rows(x: torch.Tensor) -> Any:
    return torch_map(lambda row: row.softmax(0) * row.sum(), x)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cond": _sine_or_cosine,
    "cond, two results": _two_results,
    "while_loop": _doubled_until_large,
    "scan": _running_sum,
    "associative_scan": _product_so_far,
    "map": _rows,
}


def _sample(sign: float) -> torch.Tensor:
    return sign * torch.linspace(0.5, 1.5, 12, dtype=torch.float64).reshape(4, 3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_the_cpu(name: str, sign: float) -> None:
    program, x = PROGRAMS[name], _sample(sign)
    with torch.no_grad():
        want = program(x)
        got = program(x.to("jax"))
        step = torchax_core.jit(program)
        jitted = step(x.to("jax"))
        step((-x).to("jax"))  # the other branch, the same program
    assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), got), want, rtol=1e-12, atol=0)
    assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), jitted), want, rtol=1e-12, atol=0)
    assert len(step.compilations) == 1


@pytest.mark.parametrize("name", ["cond", "scan", "map", "associative_scan"])
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor, run: Callable[..., Any] = PROGRAMS[name]) -> torch.Tensor:
        x = x.requires_grad_()
        loss = sum((t * t).sum() for t in torch.utils._pytree.tree_leaves(run(x)))
        return torch.autograd.grad(loss, x)[0]

    want = gradient(_sample(1))
    assert_close(gradient(_sample(1).to("jax")).cpu(), want, rtol=1e-10, atol=0)
    jitted = torchax_core.jit(lambda x: gradient(x))
    assert_close(jitted(_sample(1).to("jax")).cpu(), want, rtol=1e-10, atol=0)


def test_a_long_scan_is_compiled_once() -> None:
    x = torch.ones(4096, 2, device="jax")
    with torch.no_grad():
        carry, before = _running_sum(x)
    assert carry.tolist() == [4096, 4096] and before.shape == (4096, 2)


def test_a_branch_may_use_a_weight_it_was_not_given() -> None:
    weight = torch.full((3,), 2.0, device="jax", requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * weight, lambda x: x - weight, (x,)).sum()

    for run in (loss, torchax_core.jit(loss)):
        gradient = torch.autograd.grad(run(torch.ones(3, device="jax")), weight)[0]
        assert gradient.tolist() == [1, 1, 1]
        gradient = torch.autograd.grad(run(-torch.ones(3, device="jax")), weight)[0]
        assert gradient.tolist() == [-1, -1, -1]


def _recurrence(a: Any, b: Any) -> Any:
    return b[0] * a[0], b[0] * a[1] + b[1]


WITH_WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a cond in a scan": lambda x, w: scan(
        lambda c, r: (torch.cond(r.sum() > 2, lambda c: c * w, lambda c: c + w, (c,)), c * r), x[0] * 0 + 1, x
    ),
    "a map in a cond": lambda x, w: torch.cond(
        x.sum() > 0, lambda x: torch_map(lambda r: (r * w).sin(), x), lambda x: x - w, (x,)
    ),
    "associative_scan of a recurrence": lambda x, w: associative_scan(
        _recurrence, (x.sigmoid(), x * w), dim=0, reverse=True, combine_mode="generic"
    ),
    "associative_scan with a weight": lambda x, w: associative_scan(
        lambda a, b: a * b * w, x, dim=0, combine_mode="generic"
    ),
}


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights_in_closures_and_nesting(name: str) -> None:
    program = WITH_WEIGHTS[name]

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sum(t.sum() for t in torch.utils._pytree.tree_leaves(program(x, w)))

    def gradients(device: str, wrap: Callable[..., Any] = lambda f: f) -> Any:
        x, w = _sample(1).to(device).requires_grad_(), torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64).to(device)
        w.requires_grad_()
        return torch.autograd.grad(wrap(lambda x: loss(x, w))(x), [x, w])  # w is met in the closure

    want = gradients("cpu")
    # eagerly first: torch's own capture of the branches is then loaded, and is kept out of the trace
    for got in (gradients("jax"), gradients("jax", torchax_core.jit)):
        assert_close([g.cpu() for g in got], [*want], rtol=1e-10, atol=0)
    x, w = _sample(1).to("jax").jax(), torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64, device="jax").jax()
    with jax.enable_x64(True):
        got = jax.grad(torchax_core.interop.jax_view(loss), argnums=(0, 1))(x, w)
    assert_close([torchax_core.tensor(g).cpu() for g in got], [*want], rtol=1e-10, atol=0)


def test_gradients_of_a_while_loop() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * w), (start, x))[1].sum()

    def gradient(device: str) -> torch.Tensor:
        w = torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64).to(device).requires_grad_()
        return torch.autograd.grad(loss(_sample(1).to(device).requires_grad_(), w), w)[0].cpu()

    assert_close(gradient("jax"), gradient("cpu"))
    w = torch.ones(3, dtype=torch.float64, device="jax", requires_grad=True)
    jitted = torchax_core.jit(lambda x: loss(x, w))(_sample(1).to("jax"))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
        torch.autograd.grad(jitted, w)
