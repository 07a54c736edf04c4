"""layouts.py: tensors that the device has none of are refused, and the error says what to make of them first."""

import pytest
import torch

from torchax_core.errors import ConversionError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of prototypes


@pytest.mark.parametrize(
    "make, instead",
    [
        (lambda: torch.eye(3).to_sparse(), r"\.to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"\.to_dense\(\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"\.dequantize\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "torch.jagged"),
    ],
)
def test_moving_one_to_the_device(make, instead):
    with pytest.raises(ConversionError, match=instead):
        make().to("jax")


def test_jagged_nested_tensors_are_at_home():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).to("jax")
    assert [x.sum().item() for x in (nested * 2).unbind()] == [4.0, 6.0]
