"""torch.distributed.checkpoint on tensors of the device, in one process without a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchax_core

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("jax")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4, device="jax")).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "save", [dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()], ids=["save", "async_save"]
)
def test_model_and_optimizer(tmp_path, save) -> None:
    model, optimizer = _trained()
    states = get_state_dict(model, optimizer)
    save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=tmp_path)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("jax")
    others = torch.optim.AdamW(other.parameters())
    into = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(into, checkpoint_id=tmp_path)
    set_state_dict(other, others, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    for ours, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert ours.device.type == "jax" and torch.equal(ours.cpu(), theirs.cpu())
    for name, moment in others.state[other[0].weight].items():
        assert torch.equal(moment.cpu(), optimizer.state[model[0].weight][name].cpu())
    on_cpu = {"model": {name: torch.zeros_like(value, device="cpu") for name, value in model.state_dict().items()}}
    dcp.load(on_cpu, checkpoint_id=tmp_path)
    assert torch.equal(on_cpu["model"]["0.weight"], model[0].weight.detach().cpu())


def test_dtypes_and_views(tmp_path) -> None:
    tensors = {str(dtype): torch.arange(6, device="jax").reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"view": torch.arange(6.0, device="jax").reshape(2, 3).t(), "scalar": torch.tensor(3.0, device="jax")}
    dcp.save(tensors, checkpoint_id=tmp_path)
    found = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(found, checkpoint_id=tmp_path)
    for name, value in tensors.items():
        assert isinstance(found[name], torchax_core.Tensor) and found[name].dtype is value.dtype
        assert found[name].cpu().contiguous().view(-1).tolist() == value.cpu().contiguous().view(-1).tolist()
