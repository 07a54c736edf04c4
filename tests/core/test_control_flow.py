"""torch.cond, while_loop, scan and map on device "jax": in compiled functions, with gradients, and in exported programs."""

from __future__ import annotations

import jax
import pytest
import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

import torchax_core
import torchax_core.control_flow
from torchax_core.export import exported_program_to_jax


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_sign(x):
    return torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos() * 2,), (x,))[0]


def running_sum(x):
    return scan(lambda carry, row: (carry + row, carry * row), x[0], x)


def each_row(x):
    return torch_map(lambda row, scale: row.softmax(0) * scale, x, x.sum())


def doubled_until_large(x):
    return while_loop(lambda i, a: a.abs().sum() < 100, lambda i, a: (i + 1, a * 2), (torch.zeros_like(x[0, 0]), x))


def gradients(fn, x):
    x = x.requires_grad_()
    results = pytree.tree_leaves(fn(x))
    sum(r.sum() for r in results).backward()
    return [*(r.detach() for r in results), x.grad]


@pytest.mark.parametrize("fn", [by_sign, running_sum, each_row])
def test_compiled_with_gradients(fn) -> None:
    run = torch.compile(fn, backend="torchax", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    inputs = [torch.rand(3, 4), -torch.rand(3, 4)]
    ours = [gradients(run, x.to("jax")) for x in inputs]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # the value decides when it runs
    for results, x in zip(ours, inputs, strict=True):
        for result, wanted in zip(results, gradients(fn, x.clone()), strict=True):
            torch.testing.assert_close(result.cpu(), wanted)


def test_compiled_while_loop() -> None:
    run = torch.compile(doubled_until_large, backend="torchax", fullgraph=True)
    for scale in (1, 20):
        x = scale * torch.rand(3, 4)
        for ours, wanted in zip(run(x.to("jax")), doubled_until_large(x), strict=True):
            torch.testing.assert_close(ours.cpu(), wanted)


def test_random_numbers_in_a_loop_are_refused() -> None:
    def f(x):
        return scan(lambda carry, row: (carry + torch.rand_like(row), row.clone()), x[0], x)

    with pytest.raises(Exception, match="draws random numbers"):
        torch.compile(f, backend="torchax", fullgraph=True)(torch.rand(3, 4, device="jax"))


def test_exported_cond() -> None:
    class BySign(torch.nn.Module):
        def forward(self, x):
            return by_sign(x)

    weights, forward = exported_program_to_jax(torch.export.export(BySign(), (torch.rand(3),)))
    run = jax.jit(forward)
    for x in (torch.rand(3), -torch.rand(3)):
        ours = run(weights, (torchax_core.convert.array_from_torch(x),))
        torch.testing.assert_close(torchax_core.convert.torch_from_array(ours), by_sign(x))
