"""How results lie where torch's meta kernels say otherwise than its CPU kernels: as the latter."""

import pytest
import torch
import torch.nn.functional as F

from torchax_core.testing import assert_same_result, sample

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def image(device, format=LAST):
    spatial = (4, 5) if format == LAST else (4, 5, 3)
    return sample((2, 3, *spatial), torch.float32).to(device).contiguous(memory_format=format)


CASES = {
    "replicate": lambda d: F.pad(image(d), (1, -1, 2, 1), mode="replicate"),
    "reflect": lambda d: F.pad(image(d, LAST_3D), (1, 1, 0, 2, 1, 1), mode="reflect"),
    "reflect backward": lambda d: torch.ops.aten.reflection_pad2d_backward(
        sample((2, 3, 6, 7), torch.float32).to(d), image(d), (1, 1, 1, 1)
    ),
    "group_norm": lambda d: F.group_norm(image(d), 3),
    "group_norm 3d": lambda d: F.group_norm(image(d, LAST_3D), 1),
    "nonzero": lambda d: image(d).ge(0).nonzero(),
    "nonzero tuple": lambda d: image(d).ge(0).nonzero(as_tuple=True),
    "argwhere": lambda d: torch.argwhere(torch.zeros(2, 3, device=d)),
    "nonzero_static": lambda d: torch.nonzero_static(image(d).ge(0), size=7),
    "rfft2": lambda d: torch.fft.rfft2(sample((5, 6, 7), torch.float64).to(d)),
    "rfftn": lambda d: torch.fft.rfftn(sample((5, 6, 7), torch.float64).to(d), dim=(1, 2, 0)),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_results_lie_as_cpu_torch_lays_them(make):
    assert_same_result(make("jax"), make("cpu"), strides=True)


def test_a_column_major_result_is_written_through_its_transpose():
    found, expected = (torch.eye(3, device=d).nonzero() for d in ("jax", "cpu"))
    for x in (found, expected):
        x.t().view(-1)[4] = 9
    assert torch.equal(found.cpu(), expected)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        found.view(-1)
