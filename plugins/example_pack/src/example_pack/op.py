"""The op for torch: schema, CPU kernel, shape rule, gradient. Nothing of torchax is needed here.

Source: https://docs.pytorch.org/tutorials/advanced/python_custom_ops.html
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["soft_threshold"]


@torch.library.custom_op("example_pack::soft_threshold", mutates_args=(), device_types="cpu")
def soft_threshold(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """`x` moved towards 0 by `threshold`, and 0 where it is no larger: the proximal step of an L1 penalty.

    x:       any shape, floating.
    returns: the shape and dtype of `x`.
    raises:  RuntimeError for another dtype.
    """
    _check(x)
    return torch.sign(x) * torch.relu(torch.abs(x) - threshold)


@soft_threshold.register_fake
def _(x: torch.Tensor, threshold: float) -> torch.Tensor:
    # Also run by torchax-core, once for every new shape: it says what the lowering must return, and makes bad calls
    # fail with the same message on every device.
    _check(x)
    return torch.empty_like(x)


def _check(x: torch.Tensor) -> None:
    torch._check(x.is_floating_point(), lambda: f"soft_threshold: `x` must be floating, but has dtype {x.dtype}.")


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.threshold = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    # Plain torch ops: they run wherever `grad` is. An op whose backward is worth a kernel of its own makes that a
    # second custom op, with a lowering of its own.
    (x,) = ctx.saved_tensors
    return grad * (torch.abs(x) > ctx.threshold), None


soft_threshold.register_autograd(_backward, setup_context=_keep_for_backward)
