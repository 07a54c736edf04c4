"""Calls that have a function of their own (forms.py) give what the first such call gave, and only they take it."""

from __future__ import annotations

import jax
import pytest
import torch
from torch.testing import assert_close

import torchax_core


def _kernel(op):
    return torchax_core.default_env()._kernel(op)


def _again(fn, *args):
    """fn on CPU and, three times over, on "jax": the first call, one that makes a form, one that takes it."""
    moved = [a.to("jax") if isinstance(a, torch.Tensor) else a for a in args]
    want = fn(*args)
    for _ in range(3):
        got = fn(*moved)
        assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), got), want)


def test_forms_of_one_op_in_turn() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    _again(
        lambda x: [
            x.sum(),
            x.sum(0),
            x.sum([0, 1]),
            x.sum(1, keepdim=True),
            x.t().sum(0),
            x.sum(0, dtype=torch.float64),
        ],
        x,
    )
    assert len(_kernel(torch.ops.aten.sum.dim_IntList).calls) >= 3


def test_static_values_and_numbers_are_kept_apart() -> None:
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    _again(lambda x: [x.sum(1, keepdim=True), x.sum(1, keepdim=False), x.sum(0, keepdim=True)], x)
    _again(lambda x: [x * 2, x * 2.5, x * 3, x * True, x * -0.0, x * 0.0], x)
    _again(lambda x: [torch.add(x, x, alpha=2), torch.add(x, x, alpha=0.5), torch.add(x, x)], x)


def test_lists_of_tensors() -> None:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    _again(lambda x, y: [torch.cat([x, y]), torch.cat([x]), torch.cat([x, y, x]), torch.cat([y, x], 1)], x, y)
    i = torch.tensor([1, 0])
    _again(lambda x, i: [x[i], x[:, i], x[i, i], x.t()[i]], x, i)
    _again(lambda x: torch._foreach_add([x], 1.0) + torch._foreach_add([x, x], 1.0), x)


def test_masks_are_no_call_of_the_form_of_indices() -> None:
    x = torch.arange(3.0)
    _again(
        lambda x: [x[torch.tensor([0, 2], device=x.device)], x[torch.tensor([True, False, True], device=x.device)]], x
    )


def test_several_results() -> None:
    _again(lambda x: torch.max(x, 1), torch.tensor([[1.0, 3.0], [2.0, 0.0]]))
    _again(lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5), torch.randn(3, 4))


def test_ints_follow_the_default_dtype() -> None:
    n = torch.arange(3, device="jax")
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert (n / 2).dtype is dtype and n.exp().dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("write", [lambda a, b: a.add_(b), lambda a, b: a.mul_(2.0), lambda a, b: a.copy_(b)])
def test_writes(write) -> None:
    def run(x):
        x = x.clone()
        before = x.clone()
        seen = [x.jax()] if x.device.type == "jax" else []  # somebody else's array, which a write must leave alone
        for _ in range(3):
            write(x[1:3], x[0:2].clone())
            write(x[0], x[1])  # views of the storage that is written
            write(x.t(), x.t() + 1)
            write(x, before)
            assert write(x, x) is x
        if seen:
            assert_close(torch.from_numpy(jax.device_get(seen[0]).copy()), before.cpu())
        return x

    x = torch.randn(4, 4)
    assert_close(run(x.to("jax")).cpu(), run(x))


def test_a_view_that_has_been_read() -> None:
    def run(x):
        x = x.clone()
        results = []
        for _ in range(4):
            row = x[1]
            results.append(row + 1)  # unread
            results.append(row.sum() + row.sum())
            results.append(row * row)  # read by now
            x.add_(1)
            results.append(row * row)  # and out of date
        return results

    _again(run, torch.randn(3, 4))


def test_an_override_is_not_passed_by() -> None:
    x = torch.ones(2, device="jax")
    for _ in range(3):
        assert torch.exp2(x).tolist() == [2, 2]
    with torchax_core.default_env().override_op_definition("aten::exp2", lambda self: self * 10, is_jax_function=True):
        assert torch.exp2(x).tolist() == [10, 10]
        assert torch.exp2(x).tolist() == [10, 10]
    assert torch.exp2(x).tolist() == [2, 2]


def test_more_forms_than_are_kept() -> None:
    x = torch.ones(1)
    for _ in range(3):
        _again(lambda x: [torch.cat([x] * n) for n in range(1, 12)], x)
    assert len(_kernel(torch.ops.aten.cat.default).calls) <= 6
