"""torchax_core.train and mesh_util: optax steps, scanned layers against unrolled ones, models over a mesh."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import jax
import optax
import pytest
import torch
from torch import nn

import torchax_core
from torchax_core import interop, mesh_util, train


def close(ours, wanted) -> None:
    torch.testing.assert_close(ours.detach().cpu(), wanted.detach().cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
@pytest.mark.parametrize("jitted", [True, False])
def test_make_train_step_follows_cpu(policy, jitted) -> None:
    cpu = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = copy.deepcopy(cpu).to("jax")
    weights = dict(model.named_parameters())
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = train.make_train_step(
        lambda weights, buffers, args: torch.func.functional_call(model, {**weights, **buffers}, args),
        nn.functional.mse_loss,
        optimizer,
        policy,
    )
    if jitted:
        step = interop.jax_jit(step, {"donate_argnums": (2,)})
    state = interop.call_jax(optimizer.init, weights)
    reference = torch.optim.SGD(cpu.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        loss, weights, state = step(weights, {}, state, (x.to("jax"),), y.to("jax"))
        assert not loss.requires_grad
        reference.zero_grad()
        wanted = nn.functional.mse_loss(cpu(x), y)
        wanted.backward()
        reference.step()
        close(loss, wanted)
    for name, parameter in cpu.named_parameters():
        close(weights[name], parameter)


def test_remat_and_mark_sharding() -> None:
    x = torch.ones(3, device="jax", requires_grad=True)
    mesh = jax.make_mesh((1,), ("x",))
    out = train.remat(lambda x: x.sin(), prevent_cse=False)(x)
    marked = train.mark_sharding(out, jax.sharding.NamedSharding(mesh, jax.P("x")))
    marked.sum().backward()
    close(x.grad, torch.ones(3).cos())
    assert marked.jax().sharding.spec == jax.P("x")


class Layer(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(p)
        self.scale = torch.full((1,), 0.5)

    def forward(self, x, y, active=True):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x) + y))) * self.scale if active else x


def scanned(p: float, **options) -> tuple[train.ScannedModule, list[Layer]]:
    layers = [Layer(p) for _ in range(3)]
    module = train.ScannedModule(copy.deepcopy(layers), **options).to("jax")
    for layer in layers:
        layer.to("jax").scale = layer.scale.to("jax")
    return module, layers


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_scanned_layers_are_the_unrolled_ones(p, policy) -> None:
    module, layers = scanned(p, checkpoint_policy=policy)
    x = torch.randn(5, 4, device="jax", requires_grad=True)
    y = torch.randn(4, device="jax", requires_grad=True)

    def unrolled(x):
        for layer in layers:
            x = layer(x, y)
        return x

    found = []
    for run in (lambda x: module(x, y, active=True), unrolled):
        torch.manual_seed(1)
        x.grad = y.grad = None
        for _ in range(2):
            out = run(x)
            out.square().sum().backward()
        found.append((out, x.grad, y.grad, torch.rand(3, device="jax")))
    for ours, wanted in zip(*found):
        close(ours, wanted)
    for name, parameter in module.params.items():
        theirs = [layer.get_parameter(name.replace("___", ".")) for layer in layers]
        assert parameter.requires_grad == theirs[0].requires_grad
        if parameter.requires_grad:
            close(parameter.grad, torch.stack([p.grad for p in theirs]))
    close(module.norm___running_var, torch.stack([layer.norm.running_var for layer in layers]))
    assert module.norm___num_batches_tracked.tolist() == [2, 2, 2]
    assert "scale" not in module.state_dict() and "norm___running_mean" in module.state_dict()
    module.eval()
    for layer in layers:
        layer.eval()
    close(module(x, y), unrolled(x))
    assert module(x, y, active=False).tolist() == x.tolist()
    close(copy.deepcopy(module)(x, y), unrolled(x))


def test_a_scanned_module_in_a_training_step_is_one_loop() -> None:
    module, _ = scanned(0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    y = torch.zeros(4, device="jax")

    def step(x):
        optimizer.zero_grad()
        loss = module(x, y).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(5, 4, device="jax")
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(0)
    losses = [step(x).item() for _ in range(3)]
    module.load_state_dict(before)
    torch.manual_seed(0)
    jitted = torchax_core.jit(step)
    assert [jitted(x).item() for _ in range(3)] == pytest.approx(losses, rel=1e-4)
    # the layer's product, again for the backward, and two gradients: not three of each
    assert jitted.lower(x).as_text().count("stablehlo.dot_general") == 4


def test_layers_that_cannot_be_scanned() -> None:
    layer = Layer()
    for layers, message in [
        ([], "at least one layer"),
        ([layer, layer], "is in `module_list` twice"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], r"weight is \(\(3, 2\), torch.float32, True\) in layer 1"),
        ([nn.Linear(2, 2), nn.ReLU()], "layer 1 is a ReLU"),
    ]:
        with pytest.raises(ValueError, match=message):
            train.ScannedModule(layers)


MESH = """
import jax, torch, torchax_core
from torchax_core.mesh_util import Mesh

class Tied(torch.nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.embed = torch.nn.Embedding(8, width)
        self.head = torch.nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(8.0) * scale, persistent=False)
        self.odd = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids))) * self.table

mesh = Mesh.fsdp_mesh()
torch.manual_seed(0)
model = mesh.initialize_model_sharded(Tied, (16,), {"scale": 2.0})
assert model.head.weight is model.embed.weight and not model.odd.requires_grad
assert len(model.embed.weight.jax().addressable_shards) == 4
assert model.embed.weight.jax().addressable_shards[0].data.shape == (2, 16)
assert model.odd.jax().sharding.is_fully_replicated and model.table.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
assert model.embed.weight.std().item() > 0.5
plain = Tied(16, 2.0)
plain.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
ids = torch.arange(8)
torch.testing.assert_close(model(ids.to("jax")).cpu(), plain(ids), rtol=1e-4, atol=1e-4)
model(ids.to("jax")).square().sum().backward()
plain(ids).square().sum().backward()
torch.testing.assert_close(model.embed.weight.grad.cpu(), plain.embed.weight.grad, rtol=1e-3, atol=1e-3)
other = mesh.shard_model(Tied(16, 2.0), lambda name, t: jax.P(None, "fsdp") if t.ndim == 2 else jax.P())
assert other.embed.weight.jax().addressable_shards[0].data.shape == (8, 4)
assert other.head.weight is other.embed.weight
from torchax_core import interop
run = interop.jax_shard_map(
    lambda x: x.sum(0, keepdim=True), {"mesh": mesh.jax_mesh, "in_specs": jax.P("fsdp"), "out_specs": jax.P("fsdp")}
)
assert run(torch.arange(8.0, device="jax")).tolist() == [1, 5, 9, 13]
print("done")
"""


def test_models_on_four_devices() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", MESH], env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_sharders() -> None:
    sharder = mesh_util.SingleAxisSharder("x", 4)
    assert sharder("w", torch.empty(3, 8, 4)) == jax.P(None, "x", None)
    with pytest.raises(ValueError, match=r"no dimension of w, of shape \(3, 5\), is a multiple of the 4 devices"):
        sharder("w", torch.empty(3, 5))
    assert mesh_util.SingleAxisSharder("x", 4, True)("w", torch.empty(3)) == jax.P()
    with pytest.raises(ValueError, match="needs a sharder"):
        mesh_util.Mesh(jax.make_mesh((1, 1), ("a", "b"))).shard_model(nn.Linear(2, 2))
