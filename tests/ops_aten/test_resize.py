"""resize.py against CPU torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, sample

NDIM = {"nearest": 2, "nearest-exact": 2, "linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
SIZES = [(4, 5, 3), (18, 8, 14), (1, 16, 7)]
"""Smaller, the same, doubled, and one."""


def image(ndim, dtype=torch.float64):
    return sample((2, 3, *(9, 8, 7)[:ndim]), dtype)


@pytest.mark.parametrize("mode", NDIM)
def test_sizes(mode):
    ndim = NDIM[mode]
    for size in SIZES:
        assert_matches_torch(F.interpolate, image(ndim), size[:ndim], mode=mode, grad=True)
    if "nearest" not in mode:
        for size in SIZES[:2]:
            assert_matches_torch(F.interpolate, image(ndim), size[:ndim], mode=mode, align_corners=True, grad=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("ndim", [1, 3])
def test_nearest_in_other_dims(mode, ndim):
    assert_matches_torch(F.interpolate, image(ndim), (4, 13, 3)[:ndim], mode=mode, grad=True)


@pytest.mark.parametrize("mode", NDIM)
def test_scale_factors(mode):
    for factor in (0.6, 1.7):
        assert_matches_torch(F.interpolate, image(NDIM[mode]), scale_factor=factor, mode=mode, grad=True)
    recomputed = {"recompute_scale_factor": True, "mode": mode}
    assert_matches_torch(F.interpolate, image(NDIM[mode]), scale_factor=1.3, **recomputed)


@pytest.mark.parametrize(
    ("mode", "antialias"), [*((mode, False) for mode in NDIM), ("bilinear", True), ("bicubic", True)]
)
def test_sizes_of_nothing_are_refused_in_torchs_words(mode, antialias):
    x = torch.ones(1, 1, *[1] * NDIM[mode])
    with pytest.raises(RuntimeError) as theirs:
        F.interpolate(x, scale_factor=0.5, mode=mode, antialias=antialias)
    with pytest.raises(RuntimeError) as ours:
        F.interpolate(x.to("jax"), scale_factor=0.5, mode=mode, antialias=antialias)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(mode):
    for size in SIZES:
        assert_matches_torch(F.interpolate, image(2), size[:2], mode=mode, antialias=True, grad=True)
    assert_matches_torch(F.interpolate, image(2), scale_factor=(0.4, 1.3), mode=mode, antialias=True, grad=True)
    assert_matches_torch(F.interpolate, image(2), (4, 5), mode=mode, antialias=True, align_corners=True)
    assert_matches_torch(
        F.interpolate, sample((1, 1, 60, 4), torch.float64), (2, 4), mode=mode, antialias=True, grad=True
    )


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(mode, dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    size = (11, 3, 10)[: NDIM[mode]]
    assert_matches_torch(F.interpolate, image(NDIM[mode], dtype), size, mode=mode, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_uint8(mode, antialias):
    """To the bit, in the fixed point arithmetic of torch's kernels."""
    x = sample((2, 3, 19, 18), torch.uint8, low=0, high=256)
    assert_matches_torch(F.interpolate, x, (11, 23), mode=mode, antialias=antialias)


def test_uint8_nearest():
    assert_matches_torch(F.interpolate, sample((2, 3, 9, 8), torch.uint8, low=0, high=256), (4, 13), mode="nearest")


def test_a_great_many_taps():
    """More of them than are gathered one by one: 70 of the rows, and in the gradient 150 of the columns."""
    x = sample((1, 2, 70, 3), torch.float64)
    assert_matches_torch(F.interpolate, x, (1, 4), mode="bicubic", antialias=True, grad=True)
    assert_matches_torch(F.interpolate, x, (70, 150), mode="bicubic", antialias=True, grad=True)


def test_infinities_stay_where_they_are():
    x = image(2, torch.float32)
    x[0, 0, 2, 2] = float("inf")
    for mode in ("nearest", "bilinear"):
        assert_matches_torch(F.interpolate, x, (18, 16), mode=mode)
    for size in ((3, 3), (3, 16)):
        assert_matches_torch(F.interpolate, x, size, mode="bilinear", antialias=True)
    assert_matches_torch(F.adaptive_avg_pool2d, x, (3, 4))


PADDINGS = set(itertools.product(["zeros", "border", "reflection"], [False, True]))
"""With whether corners are aligned. Of the modes other than bilinear, and in three dims, a part of them is run."""
FEW_PADDINGS = {("zeros", False), ("border", True), ("reflection", False), ("reflection", True)}


@pytest.mark.parametrize(
    ("mode", "padding_mode", "align_corners"),
    [
        (mode, *padding)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in sorted(PADDINGS if mode == "bilinear" else FEW_PADDINGS)
    ],
)
def test_grid_sample(mode, padding_mode, align_corners):
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    grid = sample((2, 4, 7, 2), torch.float64, low=-2, high=2, seed=1)
    assert_matches_torch(F.grid_sample, image(2), grid, grad=True, **options)
    three_dims = FEW_PADDINGS if mode == "bilinear" else {("zeros", False)} if mode == "nearest" else {}
    if (padding_mode, align_corners) in three_dims:
        grid = sample((2, 3, 4, 5, 3), torch.float64, low=-2, high=2, seed=1)
        assert_matches_torch(F.grid_sample, image(3), grid, grad=True, **options)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_nan_in_a_grid(mode):
    """It clips to the first element if paddings clip; outside, with zeros, it is nowhere. A cubic kernel of it is NaN."""
    grid = torch.tensor([[[[float("nan"), 0.1], [0.2, float("nan")], [0.3, 0.4]]]], dtype=torch.float64)
    for padding_mode in ("zeros", "border", "reflection"):
        assert_matches_torch(F.grid_sample, image(2)[:1], grid, mode, padding_mode, align_corners=False)


def test_grid_sample_at_the_edges():
    corners = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    grid = torch.cartesian_prod(corners, corners).reshape(1, 3, 3, 2)
    for padding_mode in ("zeros", "border", "reflection"):
        options = {"padding_mode": padding_mode, "align_corners": True}
        assert_matches_torch(F.grid_sample, image(2)[:1], grid, grad=True, **options)
        assert_matches_torch(F.grid_sample, image(3)[:1], F.pad(grid, (0, 1))[:, None], grad=True, **options)


def test_shuffles():
    x = sample((2, 8, 4, 6), torch.float64)
    turned = x.to(memory_format=torch.channels_last)
    for shuffle, by in ((F.pixel_shuffle, 2), (F.pixel_unshuffle, 2), (F.channel_shuffle, 4)):
        assert_matches_torch(shuffle, x, by, grad=True)
        assert_matches_torch(shuffle, turned, by)
        assert shuffle(turned.to("jax"), by).stride() == shuffle(turned, by).stride()
    assert_matches_torch(F.pixel_shuffle, x[0], 2)


def test_left_to_torchs_decompositions():
    theta = sample((2, 2, 3), torch.float64)
    assert_matches_torch(F.affine_grid, theta, [2, 3, 4, 5], align_corners=False, grad=True)
