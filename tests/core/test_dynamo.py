"""torch.compile(backend="torchax"): what the compiled function computes, against eager torch on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test compiles anew, and leaves nothing compiled behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, **options):
    return torch.compile(fn, backend="torchax", **options)


def close(ours: torch.Tensor, cpu: torch.Tensor, **tolerances) -> None:
    assert ours.device.type == "jax"
    torch.testing.assert_close(ours.cpu(), cpu, **tolerances)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_inference() -> None:
    model = network().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        wanted = model(x)
        run = compiled(copy.deepcopy(model).to("jax"), fullgraph=True)
        close(run(x.to("jax")), wanted)


def test_training_step_with_buffers() -> None:
    cpu = network()
    ours = copy.deepcopy(cpu).to("jax")
    run = compiled(ours, fullgraph=True)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        for p in [*cpu.parameters(), *ours.parameters()]:
            p.grad = None
        wanted = cpu(x)
        wanted.square().sum().backward()
        result = run(x.to("jax"))
        result.square().sum().backward()
        close(result, wanted)
        for name, parameter in cpu.named_parameters():
            close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    for name, buffer in cpu.named_buffers():
        close(ours.get_buffer(name), buffer)
