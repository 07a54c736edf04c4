"""The copying forms of view ops, which follow from the views; what views do is tested in tests/core/test_views.py."""

from __future__ import annotations

import pytest
import torch

from torchax_core.testing import assert_matches_torch

aten = torch.ops.aten
CALLS = {
    "alias": (aten.alias_copy, ()),
    "as_strided": (aten.as_strided_copy, ((2, 2), (1, 2), 1)),
    "detach": (aten.detach_copy, ()),
    "diagonal": (aten.diagonal_copy, (1,)),
    "expand": (aten.expand_copy, ((2, 3, 4),)),
    "permute": (aten.permute_copy, ((1, 0),)),
    "select": (aten.select_copy.int, (1, -1)),
    "slice": (aten.slice_copy.Tensor, (1, 1, None, 2)),
    "split": (aten.split_copy.Tensor, (2, 1)),
    "split sizes": (aten.split_with_sizes_copy, ((1, 2), 0)),
    "squeeze": (aten.squeeze_copy, ()),
    "t": (aten.t_copy, ()),
    "transpose": (aten.transpose_copy.int, (0, 1)),
    "unbind": (aten.unbind_copy.int, (1,)),
    "unfold": (aten.unfold_copy, (1, 2, 1)),
    "unsqueeze": (aten.unsqueeze_copy, (1,)),
    "view": (aten.view_copy, ((4, 3),)),
    "view dtype": (aten.view_copy.dtype, (torch.int32,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_copies_of_views(name: str) -> None:
    op, arguments = CALLS[name]
    x = torch.arange(12.0).reshape(3, 4)
    assert_matches_torch(op, x, *arguments)
    on_device = x.to("jax")
    copy = op(on_device, *arguments)
    for part in copy if isinstance(copy, (list, tuple)) else [copy]:
        part.zero_()
    assert torch.equal(on_device.cpu(), x)  # a copy


def test_complex_copies_of_views() -> None:
    x = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3)
    assert_matches_torch(aten.view_as_real_copy, x)
    assert_matches_torch(aten.view_as_complex_copy, torch.view_as_real(x).clone())
    assert_matches_torch(aten._conj_copy, x)
    assert_matches_torch(aten._neg_view_copy, x)
