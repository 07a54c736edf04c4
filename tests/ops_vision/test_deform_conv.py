"""torchax_ops_vision.deform_conv against torchvision's CPU kernels: values and all gradients."""

import pytest
import torch

pytest.importorskip("torchvision", reason="the vision pack's tests need torchvision")
from torchvision.ops import DeformConv2d, deform_conv2d

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

# batch, channels, outputs, size, kernel, stride, padding, dilation, groups, offset groups
PLAIN = (2, 4, 6, (7, 8), (3, 3), 1, 0, 1, 1, 1)
GEOMETRIES = [
    PLAIN,
    (2, 4, 6, (7, 8), (3, 2), (2, 1), (1, 0), (2, 1), 2, 2),
    (1, 6, 4, (6, 6), (1, 1), 1, 0, 1, 2, 3),
    (3, 2, 2, (5, 5), (2, 3), 2, 2, 1, 1, 1),
    (0, 4, 6, (7, 8), (3, 3), 1, 0, 1, 1, 1),
]


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def arguments(geometry, dtype, *, whole=False):
    """input, offset, weight, bias, mask; the offsets reach far outside. `whole` makes them whole pixels."""
    batch, channels, outputs, size, kernel, stride, padding, dilation, groups, offset_groups = geometry
    out = [
        (n + 2 * p - (d * (k - 1) + 1)) // s + 1
        for n, k, s, p, d in zip(size, kernel, pair(stride), pair(padding), pair(dilation), strict=True)
    ]
    taps = offset_groups * kernel[0] * kernel[1]
    offset = sample((batch, 2 * taps, *out), dtype, low=-6, high=6, seed=1)
    return (
        sample((batch, channels, *size), dtype),
        offset.round() if whole else offset,
        sample((outputs, channels // groups, *kernel), dtype, seed=2),
        sample((outputs,), dtype, seed=3),
        sample((batch, taps, *out), dtype, low=0, high=1, seed=4),
    )


def masked(geometry):
    def call(input, offset, weight, bias, mask):
        return deform_conv2d(input, offset, weight, bias, *geometry[5:8], mask=mask)

    return call


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_with_mask(geometry):
    assert_matches_torch(masked(geometry), *arguments(geometry, torch.float64), grad=geometry[0] > 0)


def test_float32():
    assert_matches_torch(masked(PLAIN), *arguments(PLAIN, torch.float32), grad=True, rtol=1e-4, atol=1e-4)


def test_without_mask():
    geometry = GEOMETRIES[1]

    def call(input, offset, weight, bias):
        return deform_conv2d(input, offset, weight, bias, *geometry[5:8])

    assert_matches_torch(call, *arguments(geometry, torch.float64)[:4], grad=True)


def test_gradients_on_whole_pixels_are_torchs():
    # the interpolation has kinks there, at the border too: either side would do, and torchvision takes the right one
    assert_matches_torch(masked(PLAIN), *arguments(PLAIN, torch.float64, whole=True), grad=True)


def test_the_layer():
    torch.manual_seed(0)
    layer = DeformConv2d(4, 6, 3, padding=1)
    image, offset = sample((2, 4, 8, 8), torch.float32), sample((2, 18, 8, 8), torch.float32, seed=1)
    with torch.no_grad():
        expected = layer(image, offset)
        ours = layer.to("jax")(image.to("jax"), offset.to("jax"))
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_half_is_computed_in_float32():
    halves = [x.half() for x in arguments(PLAIN, torch.float32)]
    ours = masked(PLAIN)(*(x.to("jax") for x in halves))
    assert ours.dtype == torch.float16
    exact = masked(PLAIN)(*(x.float() for x in halves))
    torch.testing.assert_close(ours.cpu().float(), exact, rtol=1e-3, atol=1e-3)


def test_training_step_under_jit():
    image, offset, weight, bias, mask = arguments(PLAIN, torch.float32)

    def loss_and_gradient(weight, *rest):
        image, offset, bias, mask = rest
        weight = weight.detach().requires_grad_()
        loss = deform_conv2d(image, offset, weight, bias, mask=mask).square().mean()
        return loss.detach(), torch.autograd.grad(loss, weight)[0]

    expected = loss_and_gradient(weight, image, offset, bias, mask)
    ours = torchax_core.jit(loss_and_gradient)(*(x.to("jax") for x in (weight, image, offset, bias, mask)))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


def test_errors_name_what_does_not_fit():
    image, offset, weight, bias, mask = arguments(PLAIN, torch.float32)
    assert "`offset`" in assert_same_error(deform_conv2d, image, offset[..., :3], weight, bias)
    assert "`mask`" in assert_same_error(deform_conv2d, image, offset, weight, bias, mask=mask[:, :4])
    assert "`weight`" in assert_same_error(deform_conv2d, image, offset, weight[:, :3], bias)
    with pytest.raises(torchax_core.errors.ShapeError, match="`stride`"):  # torchvision divides by it: the process dies
        deform_conv2d(*(x.to("jax") for x in (image, offset, weight, bias)), 0)
