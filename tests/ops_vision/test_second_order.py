"""torchax_ops_vision.second_order: gradients of gradients, which torchvision has none of, against the same in plain torch."""

import pytest
import torch
from torchvision.ops import deform_conv2d, roi_align
from torchvision.ops.roi_align import _roi_align

import torchax_core
from torchax_core.testing import sample

plain_roi_align = _roi_align.__wrapped__  # torchvision's own in torch code, which it would compile


def second_order(fn, tensors):
    """The gradients of a number made of the gradients of `fn`."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    weights = [torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
    first = torch.autograd.grad(fn(*leaves).pow(3).sum(), leaves, create_graph=True)
    number = sum((grad.square().flatten() * w).sum() for grad, w in zip(first, weights, strict=True))
    return [*first, *torch.autograd.grad(number, leaves)]


def compare(fn, plain, tensors, **tolerances):
    ours = second_order(fn, [tensor.to("jax") for tensor in tensors])
    expected = second_order(plain, [tensor.double() for tensor in tensors])
    assert all(float(grad.abs().max()) > 1e-3 for grad in expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, **tolerances)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_roi_align(dtype, aligned):
    rois = torch.tensor([[0, 1.0, 1, 6, 5], [1, 0.5, 0, 3, 9], [0, 4, 4, 4, 4]], dtype=dtype)

    def call(image):
        return roi_align(image, rois.to(image.device), (2, 3), 0.7, 2, aligned)

    def plain(image):
        return plain_roi_align(image, rois.double(), 0.7, 2, 3, 2, aligned)

    exact = {"rtol": 1e-7, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    compare(call, plain, [sample((2, 3, 7, 8), dtype)], **exact)


def test_roi_align_in_a_compiled_step():
    rois = torch.tensor([[0, 1.0, 1, 6, 5]], dtype=torch.float64)
    image = sample((1, 2, 7, 8), torch.float64)

    def step(image, rois):
        return second_order(lambda image: roi_align(image, rois, 2, 1.0, 2), [image])[1]

    ours = torchax_core.jit(step)(image.to("jax"), rois.to("jax"))
    expected = second_order(lambda image: plain_roi_align(image, rois, 1.0, 2, 2, 2, False), [image])[1]
    torch.testing.assert_close(ours.cpu(), expected)


def plain_deform_conv(input, offset, weight, bias, mask):
    """deform_conv2d of stride 1 without padding or groups, by indexing."""
    batch, channels, height, width = input.shape
    taps_y, taps_x = weight.shape[2:]
    out_h, out_w = offset.shape[2:]
    total = bias[None, :, None, None]
    for tap in range(taps_y * taps_x):
        y = torch.arange(out_h)[:, None] + tap // taps_x + offset[:, 2 * tap]
        x = torch.arange(out_w)[None, :] + tap % taps_x + offset[:, 2 * tap + 1]
        top, left = y.detach().floor(), x.detach().floor()
        column = 0
        for corner_y, share_y in ((top, 1 - (y - top)), (top + 1, y - top)):
            for corner_x, share_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                inside = (corner_y >= 0) & (corner_y < height) & (corner_x >= 0) & (corner_x < width)
                at = corner_y.clamp(0, height - 1).long() * width + corner_x.clamp(0, width - 1).long()
                index = at.reshape(batch, 1, -1).expand(-1, channels, -1)
                pixels = input.flatten(2).gather(2, index).reshape(batch, channels, out_h, out_w)
                column = column + pixels * (share_y * share_x * inside)[:, None]
        column = column * mask[:, tap, None]
        total = total + torch.einsum("bcyx,oc->boyx", column, weight[:, :, tap // taps_x, tap % taps_x])
    return total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_deform_conv2d(dtype):
    tensors = [
        sample((2, 2, 5, 6), dtype),
        sample((2, 8, 4, 5), dtype, low=-2, high=2, seed=1),
        sample((3, 2, 2, 2), dtype, seed=2),
        sample((3,), dtype, seed=3),
        sample((2, 4, 4, 5), dtype, low=0, high=1, seed=4),
    ]

    def call(input, offset, weight, bias, mask):
        return deform_conv2d(input, offset, weight, bias, mask=mask)

    torch.testing.assert_close(
        call(*tensors).double(), plain_deform_conv(*(t.double() for t in tensors)), rtol=1e-4, atol=1e-4
    )
    exact = {"rtol": 1e-7, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 2.0}
    compare(call, plain_deform_conv, tensors, **exact)
