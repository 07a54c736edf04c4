"""Tests that need several devices; test_distributed.py runs this file where jax has eight."""

import jax
import pytest
import torch
from jax.sharding import NamedSharding

import torchax_core

AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((8,), ("x",), axis_types=(AUTO,))
ROWS, COLUMNS = NamedSharding(MESH, jax.P("x")), NamedSharding(MESH, jax.P(None, "x"))


def layout(tensor):
    """The sharding of a tensor's array; None if it lies on one device."""
    sharding = tensor.jax().sharding
    return sharding if len(sharding.device_set) > 1 else None


def rows():
    return torch.randn(16, 8, device="jax").shard_(ROWS)


# -- a tensor on several devices stays where it is ------------------------------------------------


@pytest.mark.parametrize("like", ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "clone"])
def test_what_is_made_like_a_tensor_lies_like_it(like):
    x = rows()
    assert layout(getattr(torch, like)(x)) == ROWS
    assert layout(torch.zeros_like(x, dtype=torch.float64)) == ROWS
    assert layout(torchax_core.jit(lambda: torch.full_like(x, 2.0))()) == ROWS


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.zero_(),
        lambda x: x.normal_(),
        lambda x: x.mul_(2),
        lambda x: x.add_(torch.ones(16, 8, device="jax").shard_(COLUMNS)),
        lambda x: x.copy_(torch.ones(16, 8)),
        lambda x: x.copy_(torch.ones(8)),
        lambda x: x.copy_(torch.ones(16, 8, device="jax").shard_(COLUMNS)),
        lambda x: x[:, 0].copy_(torch.ones(16)),
        lambda x: x.t()[1:].fill_(3),
        lambda x: torch._foreach_zero_([x]),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.nn.init.orthogonal_(x),
        lambda x: torchax_core.jit(lambda: x.copy_(torch.ones(16, 8, device="jax")))(),
        lambda x: torchax_core.jit(lambda y: y.add_(1))(x),
    ],
)
def test_what_is_written_to_stays_where_it_is(write):
    x = rows()
    before = x.tolist()
    write(x)
    assert layout(x) == ROWS and x.tolist() != before


def test_shard_and_apply_lay_out_anew():
    x = rows()
    assert layout(x.shard_(COLUMNS)) == COLUMNS
    assert layout(x.apply_jax_(jax.device_put, ROWS)) == ROWS
    with pytest.raises(torchax_core.errors.ViewWriteError, match=r"a view of shape \(8, 16\) lies where its base does"):
        x.t().shard_(ROWS)


def test_load_state_dict_keeps_the_layout():
    module, other = torch.nn.Linear(8, 16).to("jax"), torch.nn.Linear(8, 16)
    module.weight.shard_(ROWS)
    module.load_state_dict(other.state_dict())
    assert layout(module.weight) == ROWS and torch.equal(module.weight.cpu(), other.weight)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2), ["exp_avg", "exp_avg_sq"]),
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), ["momentum_buffer"]),
    ],
)
def test_optimizer_state_lies_like_its_parameter(make, states, jit):
    module, plain = torch.nn.Linear(8, 16).to("jax"), torch.nn.Linear(8, 16)
    plain.load_state_dict(module.state_dict())
    module.weight.shard_(ROWS)
    optimizers = make(module.parameters()), make(plain.parameters())

    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    run = (
        torchax_core.jit(lambda x: step(module, optimizers[0], x)) if jit else lambda x: step(module, optimizers[0], x)
    )
    for x in torch.randn(3, 4, 8):
        run(x.to("jax"))
        step(plain, optimizers[1], x)
    state = optimizers[0].state[module.weight]
    assert [layout(state[name]) for name in states] == [ROWS] * len(states)
    assert layout(module.weight) == layout(module.weight.grad) == ROWS
    torch.testing.assert_close(module.weight.cpu(), plain.weight)


def test_a_jitted_step_compiles_once():
    """Its step counts, made on one device, are spread before the first call and not by it."""
    module = torch.nn.Linear(8, 16).to("jax")
    module.weight.shard_(ROWS)
    optimizer = torch.optim.AdamW(module.parameters())

    @torchax_core.jit
    def step(x):
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()

    x = torch.ones(4, 8, device="jax")
    step(x)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    step(x)
    assert not compiled
    assert layout(optimizer.state[module.weight]["step"]).is_fully_replicated
