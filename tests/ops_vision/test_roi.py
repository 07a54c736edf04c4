"""torchax_ops_vision.roi against torchvision's CPU kernels: values and gradients."""

import pytest
import torch

pytest.importorskip("torchvision", reason="the vision pack's tests need torchvision")
from torchvision.ops import MultiScaleRoIAlign, ps_roi_align, ps_roi_pool, roi_align, roi_pool

import torchax_core
from torchax_core.testing import assert_matches_torch, assert_same_error, sample

SIZES = [  # image, regions, bins, scale
    ((2, 12, 10, 13), 9, (2, 3), 1.0),
    ((1, 4, 7, 9), 5, (2, 1), 0.5),
    ((2, 98, 20, 20), 12, (7, 7), 0.25),
    ((2, 4, 6, 6), 0, (2, 2), 1.0),
    ((1, 4, 1, 5), 3, (2, 2), 1.0),
]


def regions(k, image, scale, dtype):
    """Regions of all kinds: inside, over the edge, far outside, without extent."""
    height, width = image[2:]
    batch = sample((k, 1), torch.int64, low=0, high=image[0], seed=1).to(dtype)
    corner = sample((k, 2), dtype, low=-2, high=max(height, width), seed=2)
    made = torch.cat([batch, corner, corner + sample((k, 2), dtype, low=0, high=8, seed=3)], dim=1)
    if k > 2:
        made[0, 1:] = torch.tensor([-50.0, -50, 90, 90])
        made[1, 1:] = torch.tensor([2.0, 3, 2, 3])
        made[2, 1:] = torch.tensor([500.0, 500, 510, 510])
    made[:, 1:] /= scale
    return made


def of_image(op, rois, *args):
    """`op` as a function of the image alone: torchvision has no gradients for regions."""

    def call(image):
        return op(image, rois.to(image.device), *args)

    return call


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("shape", "k", "bins", "scale"), SIZES)
def test_roi_align(shape, k, bins, scale, aligned):
    rois = regions(k, shape, scale, torch.float64)
    for sampling_ratio in (3 if aligned else 2, -1):
        op = of_image(roi_align, rois, bins, scale, sampling_ratio, aligned)
        assert_matches_torch(op, sample(shape, torch.float64), grad=True)


def test_float32():
    shape, k, bins, scale = SIZES[0]
    rois, image = regions(k, shape, scale, torch.float32), sample(shape, torch.float32)
    for op, args in ((roi_align, (2,)), (roi_pool, ()), (ps_roi_align, (2,)), (ps_roi_pool, ())):
        assert_matches_torch(of_image(op, rois, bins, scale, *args), image, grad=True)


@pytest.mark.parametrize(("shape", "k", "bins", "scale"), SIZES)
def test_roi_pool(shape, k, bins, scale):
    dtype = torch.float64
    rois = regions(k, shape, scale, dtype)
    assert_matches_torch(of_image(roi_pool, rois, bins, scale), sample(shape, dtype), grad=True)
    assert_matches_torch(of_image(torch.ops.torchvision.roi_pool, rois, scale, *bins), sample(shape, dtype))


@pytest.mark.parametrize(("shape", "k", "bins", "scale"), SIZES[:4:2] + [((2, 8, 6, 6), 0, (2, 2), 1.0)])
def test_position_sensitive(shape, k, bins, scale):
    rois, image = regions(k, shape, scale, torch.float64), sample(shape, torch.float64)
    if k:
        rois = rois[[0, *range(2, k)]]  # torchvision divides 0 by 0 in a region without extent: below
    assert_matches_torch(of_image(ps_roi_pool, rois, bins, scale), image, grad=True)
    assert_matches_torch(of_image(torch.ops.torchvision.ps_roi_pool, rois, scale, *bins), image)
    for sampling_ratio in (2, -1):
        assert_matches_torch(of_image(ps_roi_align, rois, bins, scale, sampling_ratio), image, grad=True)
        assert_matches_torch(of_image(torch.ops.torchvision.ps_roi_align, rois, scale, *bins, sampling_ratio), image)


def test_regions_without_extent():
    rois = torch.tensor([[0, 2.0, 2, 2, 2], [0, 4, 4, 2, 2]])
    image = sample((1, 4, 6, 6), torch.float32)
    for aligned in (False, True):
        assert_matches_torch(of_image(roi_align, rois, (2, 2), 1.0, -1, aligned), image, grad=True)
    assert_matches_torch(of_image(ps_roi_align, rois, (2, 2), 1.0, -1), image)  # NaN


@pytest.mark.parametrize("pooled", [3, 7])
def test_bins_fall_on_the_same_pixels(pooled):
    # one region of each whole length: XLA divides by a constant inexactly, which moved the end of every sixth bin
    lengths = torch.arange(1.0, 150)
    rois = torch.stack([0 * lengths, 0 * lengths, 0 * lengths, lengths, lengths], dim=1)
    image = torch.arange(150.0 * 150).reshape(1, 1, 150, 150)
    assert_matches_torch(of_image(roi_pool, rois, pooled), image)
    assert_matches_torch(of_image(roi_align, rois, pooled, 1.0, -1), image, rtol=1e-4)
    image = image.expand(1, pooled * pooled, 150, 150)
    assert_matches_torch(of_image(ps_roi_pool, rois, pooled), image, rtol=1e-4)


def test_roi_pool_takes_the_first_of_equals_and_no_nan():
    nan, inf = float("nan"), float("inf")
    whole = torch.tensor([[0, 0.0, 0, 3, 3]])
    for value in (1.0, nan, -inf, inf):
        image = torch.full((1, 1, 4, 4), value)
        assert_matches_torch(of_image(torch.ops.torchvision.roi_pool, whole, 1.0, 2, 2), image)
    image = torch.full((1, 1, 4, 4), nan)
    image[0, 0, 2, 1] = -5
    assert_matches_torch(of_image(torch.ops.torchvision.roi_pool, whole, 1.0, 2, 2), image)


def test_nan_stays_in_its_own_bins():
    image = sample((1, 4, 12, 12), torch.float32)
    image[0, :, 0, 0] = float("nan")
    rois = torch.tensor([[0, 0.0, 0, 10, 10], [0, 4, 4, 6, 6]])
    assert_matches_torch(of_image(roi_align, rois, (2, 2), 1.0, -1), image)
    assert_matches_torch(of_image(ps_roi_pool, rois, (2, 2)), image)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_computed_in_float32(dtype):
    image, rois = sample((1, 4, 9, 9), dtype), torch.tensor([[0, 1.0, 1, 7, 6], [0, 0, 2, 5, 8]])
    for op, args in ((roi_align, ((2, 2), 1.0, 2)), (roi_pool, ((2, 2),)), (ps_roi_align, ((2, 2),))):
        ours = op(image.to("jax"), rois.to(dtype).to("jax"), *args)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu(), op(image.float(), rois, *args).to(dtype), rtol=1e-2, atol=1e-2)


def test_autocast_takes_half_features_and_float32_regions():
    image, rois = sample((1, 4, 9, 9), torch.bfloat16), torch.tensor([[0, 1.0, 1, 7, 6]])
    for op in (roi_align, roi_pool, ps_roi_align, ps_roi_pool):
        with torch.autocast("jax", dtype=torch.bfloat16):
            ours = op(image.to("jax"), rois.to("jax"), (2, 2))
        torch.testing.assert_close(ours.cpu(), op(image.float(), rois, (2, 2)))


def test_lists_of_boxes_and_channels_last():
    boxes = [torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[1.0, 1, 5, 6], [2, 2, 3, 3]])]
    image = sample((2, 6, 8, 8), torch.float32).to(memory_format=torch.channels_last)
    assert_matches_torch(roi_align, image, boxes, (2, 2), 1.0, 2, True)


def test_roi_align_under_jit():
    rois = regions(5, (1, 4, 9, 9), 1.0, torch.float32)
    image = sample((1, 4, 9, 9), torch.float32)

    def step(image, rois):
        return roi_align(image, rois, (2, 2), 1.0, -1)

    compiled = torchax_core.jit(step)(image.to("jax"), rois.to("jax"))
    torch.testing.assert_close(compiled.cpu(), step(image, rois))


def test_feature_pyramid():
    pool = MultiScaleRoIAlign(["0", "1"], 3, 2)
    features = {"0": sample((1, 5, 32, 32), torch.float32), "1": sample((1, 5, 16, 16), torch.float32)}
    boxes = [torch.tensor([[0.0, 0, 60, 60], [4, 4, 500, 500], [10, 10, 30, 200]])]

    def call(features, boxes):
        return pool(features, boxes, [(512, 512)])

    assert_matches_torch(call, features, boxes)


def test_errors():
    image = torch.zeros(1, 4, 6, 6)
    assert_same_error(roi_align, image, torch.zeros(1, 5, dtype=torch.float64), (2, 2))
    assert_same_error(torch.ops.torchvision.roi_align, image, torch.zeros(1, 4), 1.0, 2, 2, 2, False)
    assert_same_error(ps_roi_pool, torch.zeros(1, 5, 6, 6), torch.zeros(1, 5), (2, 2))
