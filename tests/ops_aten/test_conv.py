"""conv.py against CPU torch."""

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def operands(ndim, c_in, c_out, groups=1, *, transposed=False, dtype=torch.float64):
    """An input, a weight and a bias for a convolution over `ndim` dims, of unequal sizes."""
    spatial, kernel = (7, 6, 5)[:ndim], (3, 2, 3)[:ndim]
    channels = (c_in, c_out // groups) if transposed else (c_out, c_in // groups)
    return (
        sample((2, c_in, *spatial), dtype),
        sample((*channels, *kernel), dtype, seed=1),
        sample((c_out,), dtype, seed=2),
    )


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_conv(ndim):
    x, w, b = operands(ndim, 4, 6)
    assert_matches_torch(CONVS[ndim], x, w, b, grad=True)
    x, w, b = operands(ndim, 4, 6, groups=2)
    assert_matches_torch(CONVS[ndim], x, w, b, stride=2, padding=2, dilation=2, groups=2, grad=True)
    assert_matches_torch(CONVS[ndim], x[0], w, groups=2, grad=True)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_transposed(ndim):
    x, w, b = operands(ndim, 4, 6, transposed=True)
    assert_matches_torch(TRANSPOSED[ndim], x, w, b, grad=True)
    x, w, b = operands(ndim, 4, 6, groups=2, transposed=True)
    options = {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2, "groups": 2}
    assert_matches_torch(TRANSPOSED[ndim], x, w, b, grad=True, **options)
    assert_matches_torch(TRANSPOSED[ndim], x, w, padding=3, groups=2, grad=True)  # more than the kernel reaches


def test_depthwise_and_same_padding():
    x, w, b = operands(2, 4, 8, groups=4)
    assert_matches_torch(F.conv2d, x, w, b, groups=4, grad=True)
    assert_matches_torch(F.conv2d, x, w[..., :1], b, padding="same", groups=4, grad=True)
    assert_matches_torch(F.conv2d, x, w, b, stride=(2, 1), padding=(0, 1), groups=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
def test_dtypes(dtype):
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.complex64: 1e-5, torch.float32: 1e-5}.get(dtype)
    x, w, b = operands(2, 3, 4, dtype=dtype)
    assert_matches_torch(F.conv2d, x, w, b, rtol=tolerance, atol=tolerance)
    assert_matches_torch(F.conv2d, x.transpose(2, 3), w, rtol=tolerance, atol=tolerance)


def test_complex_gradients():
    x, w, b = operands(1, 2, 3, dtype=torch.complex128)
    assert_matches_torch(F.conv1d, x, w, b, grad=True)


def test_empty_batch():
    _, w, b = operands(2, 3, 4)
    assert_matches_torch(F.conv2d, torch.empty(0, 3, 7, 6, dtype=torch.float64), w, b, grad=True)


def test_only_the_wanted_gradients():
    x, w, _ = (t.to("jax") for t in operands(2, 3, 4))
    grad = torch.ones(2, 4, 5, 5, dtype=torch.float64, device="jax")
    arguments = [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    got = torch.ops.aten.convolution_backward(grad, x, w, *arguments, [False, True, False])
    assert got[0] is None
    assert got[1].shape == w.shape
    assert got[2] is None


def test_conv_tbc():
    x, w, b = sample((5, 2, 4), torch.float64), sample((3, 4, 6), torch.float64, seed=1), sample((6,), torch.float64)
    assert_matches_torch(torch.conv_tbc, x, w, b, 1, grad=True)


@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (3, 6, 7)])
def test_unfold_and_fold(shape):
    x = sample(shape, torch.float64)
    options = {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (1, 2), "stride": (2, 1)}
    assert_matches_torch(F.unfold, x, grad=True, **options)
    columns = F.unfold(x, **options)
    assert_matches_torch(F.fold, columns, (6, 7), grad=True, **options)


def test_unfold_integers():
    with pytest.raises(
        AssertionError, match="not implemented for"
    ):  # CPU torch has it for floats only; we need not refuse
        assert_matches_torch(F.unfold, sample((1, 2, 4, 4), torch.int64), 2)


def test_errors_are_torchs():
    x, w, _ = operands(2, 3, 4)
    assert_same_error(F.conv2d, x[:, :2], w)
    assert_same_error(F.conv2d, x[:, :, :1], w)


@pytest.mark.parametrize(
    "options", [{"padding": (-1, 0, 0)}, {"dilation": -1}, {"stride": 0}], ids=["padding", "dilation", "stride"]
)
def test_settings_out_of_range(options):
    x, w = sample((1, 1, 5, 5, 5), torch.float32), sample((1, 1, 2, 2, 2), torch.float32)
    assert_same_error(torch.conv3d, x, w, wording=True, **options)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_memory_format_is_kept(transposed):
    x, w = sample((2, 3, 5, 6), torch.float32), sample((3, 3, 2, 2), torch.float32)
    turned = x.to(memory_format=torch.channels_last)
    conv = torch.conv_transpose2d if transposed else torch.conv2d
    for args in ((x, w), (turned, w), (x, w.to(memory_format=torch.channels_last))):
        ours = conv(*(a.to("jax") for a in args))
        assert ours.stride() == conv(*args).stride()
        torch.testing.assert_close(ours.cpu(), conv(*args))
