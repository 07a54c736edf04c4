"""fft.py against CPU torch: every transform of torch.fft, lengths odd and even, every norm, gradients."""

import pytest
import torch

from torchax_core.testing import assert_matches_torch, sample

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
MANY = ["fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn", "fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2"]


def transform(name):
    return getattr(torch.fft, name)


def suited(name, shape, real=torch.float64):
    takes_real = name.startswith(("rfft", "ihfft"))
    return sample(
        shape, real if takes_real else {torch.float64: torch.complex128, torch.float32: torch.complex64}[real]
    )


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ONE)
def test_one_dimension(name, norm):
    for n in (None, 1, 4, 7):
        assert_matches_torch(transform(name), suited(name, (3, 6)), n=n, norm=norm, grad=True)
    assert_matches_torch(transform(name), suited(name, (5, 2)), dim=0, norm=norm)


@pytest.mark.parametrize("name", MANY)
def test_many_dimensions(name):
    for norm in ("backward", "ortho", "forward"):
        assert_matches_torch(transform(name), suited(name, (2, 4, 5)), norm=norm, grad=True)
    assert_matches_torch(transform(name), suited(name, (2, 3, 4)), dim=(0, 2), s=(4, 5))


def test_more_axes_than_xla_takes_at_once():
    x = sample((2, 3, 2, 3, 4), torch.complex128)
    assert_matches_torch(torch.fft.fftn, x)
    assert_matches_torch(torch.fft.ifftn, x)
    assert_matches_torch(torch.fft.irfftn, x, s=(2, 3, 2, 3, 5))
    assert_matches_torch(torch.fft.rfftn, x.real, dim=(4, 0, 3, 1))


@pytest.mark.parametrize("name", ONE)
def test_float32(name):
    assert_matches_torch(transform(name), suited(name, (6,), torch.float32))


def test_no_rows():
    """CPU torch fails on these in some builds (MKL), so only shapes are checked."""
    assert torch.fft.rfft(torch.ones(0, 4, device="jax")).shape == (0, 3)
    assert torch.fft.irfft(torch.ones(0, 3, device="jax")).shape == (0, 4)
    assert torch.fft.fft2(torch.ones(0, 3, 4, device="jax")).shape == (0, 3, 4)


def test_whole_spectrum_of_real_input():
    """`fft` of a real tensor: the half that symmetry gives is there too."""
    assert_matches_torch(torch.fft.fft, sample((3, 5), torch.float32), grad=False)
    assert_matches_torch(torch.fft.fft2, sample((3, 4), torch.float64), grad=True)
    assert_matches_torch(torch.fft.fft, sample((3, 5), torch.int64))
    assert_matches_torch(torch.fft.fft, sample((3, 5), torch.bool))


def test_irfft_ignores_what_symmetry_forbids():
    x = torch.tensor([1 + 5j, 2 - 1j, 3 + 7j], dtype=torch.complex128)
    assert_matches_torch(torch.fft.irfft, x, n=4, grad=True)


def test_transposed_input():
    assert_matches_torch(lambda x: torch.fft.fft(x.t()), sample((3, 4), torch.complex64))


def test_shifts_and_frequencies():
    assert_matches_torch(torch.fft.fftshift, sample((3, 4), torch.float32))
    assert_matches_torch(torch.fft.ifftshift, sample((3, 4), torch.float32), dim=1)
    for n in (1, 4, 5):
        torch.testing.assert_close(torch.fft.fftfreq(n, d=0.5, device="jax").cpu(), torch.fft.fftfreq(n, d=0.5))
        torch.testing.assert_close(torch.fft.rfftfreq(n, device="jax").cpu(), torch.fft.rfftfreq(n))


@pytest.mark.parametrize("center", [True, False])
def test_stft_and_back(center):
    signal, window = sample((2, 64), torch.float64), torch.hann_window(16, dtype=torch.float64)

    def there(signal, window):
        return torch.stft(signal, 16, 4, window=window, center=center, return_complex=True)

    assert_matches_torch(there, signal, window, grad=True)
    if center:
        assert_matches_torch(
            lambda s, w: torch.istft(there(s, w), 16, 4, window=w, length=64), signal, window, grad=True
        )
