"""torchax_core.addresses: who shares memory with whom, as code finds out by `data_ptr`."""

import gc

import pytest
import torch
from torch import nn

import torchax_core

VIEWS = {
    "itself": lambda t: t,
    "a row": lambda t: t[1],
    "a corner": lambda t: t[1:, 2:],
    "transposed": lambda t: t.t(),
    "bytes": lambda t: t[1].view(torch.uint8)[3:],
    "detached": lambda t: t.detach(),
    "a parameter": lambda t: nn.Parameter(t),
    "written": lambda t: t.add_(1),
    "imaginary": lambda t: torch.view_as_complex(t.view(3, 2, 2)).imag,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_lies_in_its_base_as_on_the_cpu(view):
    def offset(device):
        base = torch.zeros(3, 4, device=device)
        of = VIEWS[view](base)
        assert of.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() == of.storage().data_ptr()
        return of.data_ptr() - base.data_ptr(), of.is_set_to(base)

    assert offset("jax") == offset("cpu")


def test_storages_do_not_overlap_and_keep_their_addresses():
    tensors = [torch.ones(n, device="jax") for n in (1, 1000, 3)]
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False)) and places[0][0] > 0
    before = [t.data_ptr() for t in tensors]
    torchax_core.jit(lambda: [t.mul_(2) for t in tensors])()
    assert [t.data_ptr() for t in tensors] == before and tensors[0].item() == 2
    assert torch.empty(0, device="jax").data_ptr() == 0 and not tensors[0].is_set_to(tensors[2])
    gone = tensors.pop().data_ptr()
    gc.collect()
    assert torch.ones(3, device="jax").data_ptr() != gone


def test_safetensors_keeps_one_of_tied_weights_and_refuses_shared_memory(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    def make():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = make().to("jax"), make()
    save_model(model, tmp_path / "tied")
    assert len(load_file(tmp_path / "tied")) == 1
    assert load_model(other, tmp_path / "tied") == (set(), [])
    assert torch.equal(other[1].weight, model[1].weight.cpu())
    x = torch.ones(3, 4, device="jax")
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": x, "b": x[1]}, tmp_path / "shared")


def test_the_bytes_of_a_storage_come_to_the_cpu_in_the_order_of_its_strides():
    for make in (lambda t: t, lambda t: t.t(), lambda t: t.t()[1:]):
        x = make(torch.arange(6.0).reshape(2, 3))
        ours = make(torch.arange(6.0).reshape(2, 3).to("jax"))
        assert ours.untyped_storage().cpu().tolist() == x.untyped_storage().tolist()
        again = torch.empty(0).set_(ours.untyped_storage().cpu(), ours.storage_offset(), ours.size(), ours.stride())
        assert torch.equal(again, x)
    moved = torch.arange(6.0).reshape(2, 3).t().to("jax")  # an array of its own that lies so
    assert moved.untyped_storage().cpu().tolist() == torch.arange(6.0).untyped_storage().tolist()
