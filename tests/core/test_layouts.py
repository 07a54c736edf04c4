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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.UntypedStorage(8, device="jax"),
        lambda: torch.UntypedStorage([1, 2], device=torch.device("jax", 0)),
        lambda: torch.UntypedStorage(device="jax"),
        lambda: torch.TypedStorage(8, dtype=torch.float32, device="jax"),
        lambda: torch.UntypedStorage(8).to(device=torch.device("jax")),
        lambda: torch.FloatStorage(8).to(device="jax"),
        lambda: torch.ones(3, device="jax").untyped_storage().clone(),
    ],
)
def test_storages_of_bare_bytes(make):
    # C++ has no allocator for the device: it ended the process
    with pytest.raises(ConversionError, match="torch.empty"):
        make()


def test_storages_of_other_devices():
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2] and torch.UntypedStorage(3, device="cpu").nbytes() == 3
    assert torch.UntypedStorage(8, device="meta").device.type == "meta" and torch.FloatStorage([1.0]).tolist() == [1.0]
    with pytest.raises(RuntimeError, match="construct a storage from a sequence"):
        torch.UntypedStorage("seven")
