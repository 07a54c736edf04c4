"""Gradients of jitted functions whose backward is called outside: torch's own formulas, traced with the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core.joint import JointProgram

_EDGES = torch.tensor([[0.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, torch.full_like(x, 0.5), reduction="none"),
    "atan2": lambda x: torch.atan2(x, x),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "clamp": lambda x: x.clamp(0.5, 1.0),
    "fmax": lambda x: torch.fmax(x, x.flip(1)),
    "pow": lambda x: torch.pow(torch.zeros_like(x), x),
    "entr": torch.special.entr,
    "scatter_reduce": lambda x: x.scatter_reduce(1, torch.tensor([[0, 0, 1, 1]] * 2, device=x.device), x, "prod"),
    "logsumexp": lambda x: x.log().logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "where": lambda x: torch.where(x > 0, x.sqrt(), 0 * x),
    "max_pool": lambda x: F.max_pool1d(x, 3, 1, 1),
}


def _gradient(f: Callable[[torch.Tensor], torch.Tensor], device: str, jitted: bool) -> torch.Tensor:
    x = _EDGES.to(device).requires_grad_()
    result = (torchax_core.jit(f) if jitted else f)(x)
    cotangent = torch.arange(1.0, 1 + result.numel(), dtype=result.dtype).reshape(result.shape).to(device)
    return torch.autograd.grad(result, x, cotangent)[0].cpu()


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_at_the_edges_gradients_are_torchs(name: str) -> None:
    f = _FUNCTIONS[name]
    torch.testing.assert_close(
        _gradient(f, "jax", True), _gradient(f, "cpu", False), rtol=1e-7, atol=1e-7, equal_nan=True
    )


def _program(jitted: Any) -> Any:
    ((program,),) = jitted._programs.values()
    return program.differentiable


def test_a_module_trained_outside_of_its_jitted_forward() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv1d(3, 4, 3),
            torch.nn.BatchNorm1d(4),
            torch.nn.GELU(),
            torch.nn.Flatten(),
            torch.nn.Linear(24, 2),
        )
        x, y = torch.randn(5, 3, 8), torch.randn(5, 2)
        model.to(device)
        forward = torchax_core.jit(model) if device == "jax" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.mse_loss(forward(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if device == "jax":
            assert len(forward.compilations) == 1 and isinstance(_program(forward), JointProgram)
        return [*found, *model[1].running_var.tolist()]

    assert losses("jax") == pytest.approx(losses("cpu"), rel=1e-5)


def test_what_has_no_gradient_gets_none() -> None:
    w, unused = (torch.ones(3, device="jax", requires_grad=True) for _ in range(2))
    f = torchax_core.jit(lambda x: ((x * w).sum(), unused.detach().sum()))
    x = torch.ones(3, device="jax", requires_grad=True)
    f(x)[0].backward()
    assert w.grad is not None and x.grad is not None and unused.grad is None


def test_hooks_of_weights_are_called_once() -> None:
    w = torch.ones(3, device="jax", requires_grad=True)
    calls: list[int] = []
    w.register_hook(lambda g: calls.append(1) or 2 * g)
    w.register_post_accumulate_grad_hook(lambda p: calls.append(2))
    f = torchax_core.jit(lambda x: (x * w).sum())
    f(torch.full((3,), 5.0, device="jax")).backward()
    assert calls == [1, 2]
    assert w.grad.tolist() == [10.0] * 3


def test_second_derivatives() -> None:
    def second(device: str) -> list[torch.Tensor]:
        x = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64, device=device, requires_grad=True)
        w = torch.tensor([1.0, -1.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
        f = lambda x: (x.pow(3) * w.sin(), x.detach() * w)
        a, b = (torchax_core.jit(f) if device == "jax" else f)(x)
        (g,) = torch.autograd.grad(a.sum() + b.sum(), x, create_graph=True)
        return [t.cpu() for t in torch.autograd.grad(g.square().sum(), [x, w])]

    torch.testing.assert_close(second("jax"), second("cpu"), rtol=1e-7, atol=1e-7)


def test_one_array_with_two_histories() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return -3 * gradient

    f = torchax_core.jit(lambda x: (y := 2 * x, Reverse.apply(y), y.detach()))
    for which, expected in ((0, 2.0), (1, -6.0)):
        x = torch.ones(2, device="jax", requires_grad=True)
        results = f(x)
        assert not results[2].requires_grad
        results[which].sum().backward()
        assert x.grad.tolist() == [expected] * 2


def test_checkpointed_layers_and_dropout() -> None:
    def run(jitted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5)).to("jax")
        f = lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        x = torch.ones(6, 4, device="jax", requires_grad=True)
        torch.manual_seed(1)
        y = (torchax_core.jit(f) if jitted else f)(x)
        y.sum().backward()
        kept = (y != 0).float().mean(1, keepdim=True)
        return [((x.grad != 0).any(1) == (kept[:, 0] > 0)).all().cpu(), x.grad.isfinite().all().cpu()]

    assert all(bool(t) for t in run(True))


def test_a_function_whose_backward_asks_for_values_runs_where_none_is_wanted() -> None:
    class ByValue(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (3 if x.sum().item() > 0 else 2)

    f = torchax_core.jit(lambda x: ByValue.apply(x) if x.shape[0] > 2 else x.exp())
    with torch.no_grad():
        assert f(torch.ones(3, device="jax")).tolist() == [2.0] * 3
    assert f(torch.ones(3, device="jax", requires_grad=True).detach()).tolist() == [2.0] * 3
    x = torch.zeros(2, device="jax", requires_grad=True)
    f(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_result_that_is_an_argument_or_a_weight() -> None:
    w = torch.ones(2, device="jax", requires_grad=True)
    f = torchax_core.jit(lambda x: (x, w, x * w))
    x = torch.full((2,), 3.0, device="jax", requires_grad=True)
    a, b, c = f(x)
    (a + 2 * b + c).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and w.grad.tolist() == [5.0, 5.0]
