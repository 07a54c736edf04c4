"""conformance/ties.py: indices of equal elements are all right, others are not."""

import pytest
import torch

from torchax_core.conformance.ops import op_db
from torchax_core.conformance.ties import ties_settled

X = torch.tensor([[2, 1, 2], [5, 5, 5]])


def settled(name, actual, expected, *args, **kwargs):
    from torch.testing._internal.opinfo.core import SampleInput

    return ties_settled(op_db()[name], SampleInput(X, args=args, kwargs=kwargs), actual, expected)


@pytest.mark.parametrize("right, kwargs", [(True, {}), (False, {"stable": True})])
def test_any_order_of_equal_elements_is_right_unless_stable(right, kwargs):
    expected = torch.tensor([[1, 0, 2], [0, 1, 2]])
    ours = torch.tensor([[1, 2, 0], [2, 0, 1]])
    assert (settled("argsort", ours, expected, **kwargs) is ours) is not right


@pytest.mark.parametrize("ours", [[[0, 1, 2], [0, 1, 2]], [[1, 0, 0], [0, 1, 2]], [[1, 0, 3], [0, 1, 2]]])
def test_indices_of_other_elements_of_one_twice_and_of_none_are_wrong(ours):
    ours = torch.tensor(ours)
    assert torch.equal(settled("argsort", ours, torch.tensor([[1, 0, 2], [0, 1, 2]])), ours)


def test_only_the_indices_are_settled():
    values, indices = torch.tensor([1, 5]), torch.tensor([1, 0])
    wrong = torch.tensor([0, 5])
    found = settled("kthvalue", (wrong, torch.tensor([1, 2])), (values, indices), 1)
    assert found[0] is wrong and torch.equal(found[1], indices)
