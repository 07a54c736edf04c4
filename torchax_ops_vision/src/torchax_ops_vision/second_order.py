"""Gradients of gradients: what torchvision leaves out ("double backwards ... not supported").

torchvision's autograd calls the ops `_..._backward`. On device "jax" those are differentiable here: of `roi_align`, which is
linear in its input, the backward's own backward is `roi_align` again; of `deform_conv2d` it is jax.vjp's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch

from torchax_core.vjp import DifferentiableProgram, differentiable_call
from torchax_ops_vision import deform_conv

__all__ = ["register"]

_library: torch.library.Library | None = None


def register() -> None:
    """Put these in the place of torchvision's own, for device "jax". Needs torchvision imported; twice is no fault."""
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "IMPL")  # noqa: TOR901 - kept alive with the process
        _library.impl("_roi_align_backward", roi_align_backward, "AutogradPrivateUse1")
        _library.impl("_deform_conv2d_backward", deform_conv2d_backward, "AutogradPrivateUse1")


def _recorded(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


class _RoiAlignBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, rois: torch.Tensor, geometry: tuple[Any, ...]) -> torch.Tensor:
        ctx.save_for_backward(rois)
        ctx.geometry = geometry
        return _below_autograd(torch.ops.torchvision._roi_align_backward, grad, rois, *geometry)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        spatial_scale, height, width, *_, sampling_ratio, aligned = ctx.geometry
        rois = ctx.saved_tensors[0]
        bins = torch.ops.torchvision.roi_align(cotangent, rois, spatial_scale, height, width, sampling_ratio, aligned)
        return bins, None, None


def roi_align_backward(grad: torch.Tensor, rois: torch.Tensor, *geometry: Any) -> torch.Tensor:
    """`torchvision::_roi_align_backward`, differentiable in `grad` to any order; the regions have no gradients."""
    if _recorded(grad):
        return _RoiAlignBackward.apply(grad, rois, geometry)
    return _below_autograd(torch.ops.torchvision._roi_align_backward, grad, rois, *geometry)


def deform_conv2d_backward(*args: Any) -> Any:
    """`torchvision::_deform_conv2d_backward`, differentiable in all its tensors to any order."""
    tensors, geometry = args[:6], args[6:]
    if not _recorded(*tensors):
        return _below_autograd(torch.ops.torchvision._deform_conv2d_backward, *args)

    return differentiable_call(_program(geometry), tensors)


@functools.cache
def _program(geometry: tuple[Any, ...]) -> DifferentiableProgram:
    def backward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results = deform_conv._deform_conv2d_backward(*arrays, *geometry)
        return tuple(result.astype(array.dtype) for result, array in zip(results, arrays[1:], strict=True))

    return DifferentiableProgram(backward)
