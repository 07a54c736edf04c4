"""Tests that need several devices; test_distributed.py runs this file where jax has eight."""

import copy
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

import torchax_core
from torchax_core import distributed, interop
from torchax_core.mesh_util import Mesh

AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((8,), ("x",), axis_types=(AUTO,))
GRID = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AUTO, AUTO))
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
        lambda x: nn.init.orthogonal_(x),
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
    module, other = nn.Linear(8, 16).to("jax"), nn.Linear(8, 16)
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
    module, plain = nn.Linear(8, 16).to("jax"), nn.Linear(8, 16)
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


def test_a_program_puts_its_outputs_where_they_belong():
    """Left to itself, XLA would leave them where `y` is: as columns."""
    x, y = rows().requires_grad_(), torch.ones(16, 8, device="jax").shard_(COLUMNS)
    z = torch.zeros(16, 8, device="jax").shard_(ROWS)

    @torchax_core.jit
    def step(a):
        a.copy_(y)
        z.copy_(y + 1)
        (x * y).sum().backward()

    a = torch.zeros(16, 8, device="jax").shard_(ROWS)
    step(a)
    assert layout(a) == layout(z) == layout(x.grad) == ROWS
    assert [s.spec for s in step.lower(a).compile().output_shardings] == [jax.P("x")] * 3


def test_gradients_of_a_jitted_forward_lie_like_the_weights():
    module = nn.Linear(8, 16).to("jax")
    module.weight.shard_(ROWS)
    x = torch.ones(16, 8, device="jax").shard_(ROWS)
    torchax_core.jit(module)(x).sum().backward()
    assert layout(module.weight.grad) == ROWS and module.weight.grad.tolist() == [[16] * 8] * 16


def test_a_jitted_step_compiles_once():
    """Its step counts, made on one device, are spread before the first call and not by it."""
    module = nn.Linear(8, 16).to("jax")
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


def test_loaded_optimizer_state_lies_like_its_parameter():
    def trained(sharding):
        module = nn.Linear(8, 16).to("jax")
        if sharding is not None:
            module.weight.shard_(sharding)
        optimizer = torch.optim.AdamW(module.parameters())
        return module, optimizer

    def step(module, optimizer):
        optimizer.zero_grad()
        module(torch.ones(2, 8, device="jax")).sum().backward()
        optimizer.step()

    module, optimizer = trained(None)
    step(module, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    other, into = trained(ROWS)
    into.load_state_dict(saved)
    torchax_core.jit(step)(other, into)
    assert layout(into.state[other.weight]["exp_avg"]) == ROWS
    eager, into = trained(ROWS)
    into.load_state_dict(saved)
    step(eager, into)
    assert layout(into.state[eager.weight]["exp_avg"]) == ROWS


# -- meshes and layouts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([Replicate(), Replicate()], jax.P(None, None)),
        ([Shard(0), Replicate()], jax.P("dp", None)),
        ([Replicate(), Shard(1)], jax.P(None, "tp")),
        ([Shard(1), Shard(0)], jax.P("tp", "dp")),
        ([Shard(0), Shard(0)], jax.P(("dp", "tp"), None)),
    ],
)
def test_placements_and_shardings_are_each_other(placements, spec):
    sharding = distributed.placements_to_sharding(GRID, placements, 2)
    assert sharding == NamedSharding(GRID, spec)
    assert distributed.sharding_to_placements(sharding, 2) == tuple(placements)
    assert distributed.placements_to_sharding(distributed.to_device_mesh(GRID), placements, 2) == sharding


def test_placements_say_what_dtensor_says():
    """The part of each rank, by torch's own arithmetic."""
    whole = torch.arange(32.0).reshape(8, 4)
    for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(-1)]):
        for shard in distributed.local_shards(distributed.distribute_tensor(whole, GRID, placements)):
            part = whole
            place = np.argwhere(GRID.device_ids == shard.device.id)[0]
            for placement, size, at in zip(placements, GRID.devices.shape, place, strict=True):
                if placement.is_shard():
                    part = part.chunk(size, placement.dim)[at]
            assert torch.equal(shard.tensor.cpu(), part) and torch.equal(whole[shard.index], part)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Partial(), Replicate()], r"Partial\(sum\) for axis 'dp': a tensor on device 'jax' always has its values"),
        (
            [Replicate(), _StridedShard(0, split_factor=2)],
            "for axis 'tp': a dimension is split over axes in the mesh's order",
        ),
        ([Shard(2), Replicate()], r"splits dimension 2, but the tensor has 2 dimension\(s\)"),
        ([Shard(0)], r"one placement for each of the mesh's axes \('dp', 'tp'\), but got 1"),
    ],
)
def test_placements_that_jax_has_not(placements, message):
    with pytest.raises(ValueError, match=message):
        distributed.placements_to_sharding(GRID, placements, 2)


def test_shardings_that_placements_cannot_say():
    with pytest.raises(ValueError, match=r"over \('tp', 'dp'\), and placements can only say so in the mesh's order"):
        distributed.sharding_to_placements(NamedSharding(GRID, jax.P(("tp", "dp"))), 1)
    with pytest.raises(ValueError, match="speaks of 2 dimensions, but the tensor has 1"):
        distributed.sharding_to_placements(NamedSharding(GRID, jax.P("dp", "tp")), 1)
    with pytest.raises(ValueError, match="leaves dimension 0 to XLA"):
        distributed.sharding_to_placements(NamedSharding(GRID, jax.P(jax.P.UNCONSTRAINED)), 1)
    with pytest.raises(TypeError, match=r"needs a jax.sharding.NamedSharding, .* but got SingleDeviceSharding"):
        distributed.sharding_to_placements(torch.ones(2, device="jax").jax().sharding, 1)


def test_device_meshes():
    device_mesh = distributed.to_device_mesh(GRID)
    assert device_mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and device_mesh.mesh_dim_names == ("dp", "tp")
    assert device_mesh.device_type == "jax" and device_mesh.get_coordinate() == (0, 0)
    assert distributed.to_jax_mesh(device_mesh) == GRID
    unnamed = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), _init_backend=False, _rank=0)
    mesh = distributed.to_jax_mesh(unnamed)
    assert mesh.axis_names == ("dim_0", "dim_1") and mesh.device_ids.tolist() == [[3, 1], [0, 2]]
    with pytest.raises(ValueError, match=r"has rank 8, but jax has 8 device\(s\)"):
        distributed.to_jax_mesh(DeviceMesh("cpu", torch.arange(9), _init_backend=False, _rank=0))


def test_device_meshes_of_a_process_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        whole = torch.distributed.init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
        assert distributed.to_jax_mesh(whole) == GRID
        assert distributed.to_jax_mesh(whole["tp"]).device_ids.tolist() == [4, 5, 6, 7]
        back = distributed.to_device_mesh(GRID)
        assert back == whole and back["dp"].mesh.tolist() == [1, 5] and back.get_group("tp").size() == 4
    finally:
        torch.distributed.destroy_process_group()


def test_groups_of_a_device_mesh_are_axes_in_code_for_each_device():
    pack = pytest.importorskip("torchax_ops_c10d", reason="it brings the collectives")
    from torch.distributed import _functional_collectives as collectives

    pack.init_single_process()
    try:
        device_mesh = torch.distributed.init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
        mesh, split = distributed.to_jax_mesh(device_mesh), jax.P(("dp", "tp"))
        run = interop.jax_shard_map(
            lambda x: collectives.all_reduce(x, "sum", device_mesh.get_group("tp")),
            {"mesh": mesh, "in_specs": split, "out_specs": split},
        )
        assert run(distributed.distribute_tensor(torch.arange(8.0), device_mesh, split)).tolist() == [6] * 4 + [22] * 4
    finally:
        torch.distributed.destroy_process_group()


# -- tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_distribute_and_gather(device):
    whole = torch.randn(8, 12, dtype=torch.float64, device=device, requires_grad=True)
    parts = distributed.distribute_tensor(whole, GRID, jax.P("dp", "tp"))
    assert layout(parts).spec == jax.P("dp", "tp") and parts.shape == (8, 12) and parts.dtype == torch.float64
    assert [s.tensor.shape for s in distributed.local_shards(parts)] == [(4, 3)] * 8
    full = distributed.full_tensor(parts)
    assert layout(full).is_fully_replicated and torch.equal(full.cpu(), whole.cpu())
    full.square().sum().backward()
    torch.testing.assert_close(whole.grad, 2 * whole)


def test_64_bit_tensors_go_between_layouts():
    """With 64-bit types off, as they are by default, jax would move them as 32-bit ones, and XLA would crash."""
    x = torch.randint(0, 2**40, (16, 8))
    y = x.to("jax").shard_(ROWS).shard_(COLUMNS)
    assert layout(y) == COLUMNS and torch.equal(y.cpu(), x)
    y.copy_(y.clone().shard_(ROWS))
    assert layout(y) == COLUMNS and torch.equal(y.cpu(), x)
    assert torch.equal(torchax_core.jit(lambda z: distributed.distribute_tensor(z, MESH, jax.P("x")))(y).cpu(), x)


def test_a_leaf_of_the_host_becomes_a_leaf():
    with torch.no_grad():
        made = distributed.distribute_tensor(torch.ones(8, requires_grad=True), GRID, [Shard(0), Replicate()])
    assert made.is_leaf and made.requires_grad and layout(made).spec == jax.P("dp")


def test_constraints_in_a_jitted_function():
    @torchax_core.jit
    def f(x):
        rows = distributed.with_sharding_constraint(x * 2, GRID, jax.P("tp"))
        return rows, distributed.distribute_tensor(rows, GRID, [Replicate(), Shard(1)])

    rows, columns = f(torch.ones(4, 8, device="jax"))
    assert layout(rows).is_equivalent_to(NamedSharding(GRID, jax.P("tp")), 2)
    assert layout(columns).is_equivalent_to(NamedSharding(GRID, jax.P(None, "tp")), 2)
    for look, message in [(distributed.full_tensor, "Name the mesh"), (distributed.local_shards, "a tensor is whole")]:
        with pytest.raises(ValueError, match=message):
            torchax_core.jit(look)(rows)
    with pytest.raises(TypeError, match="local_shards takes a tensor on device 'jax', but got one on cpu"):
        distributed.local_shards(torch.ones(2))


# -- modules -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, a buffer, a recurrent layer, which keeps a list of its weights, and a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.rnn = nn.LSTM(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embed.weight
        self.note = torch.ones(2)

    def forward(self, ids):
        return self.head(self.norm(self.rnn(self.embed(ids))[0]))


RULES = {"head.weight": jax.P("tp"), "rnn.weight_*": [Shard(1), Shard(0)], re.compile(r"^norm\."): None}


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_shard_module(device):
    plain = Net()
    net = copy.deepcopy(plain).to(device)
    net.head.weight.grad = torch.ones_like(net.head.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert distributed.shard_module(net, GRID, RULES) is net
    specs = {name: layout(tensor).spec for name, tensor in net.state_dict().items()}
    assert specs["embed.weight"] == specs["head.weight"] == layout(net.head.weight.grad).spec == jax.P("tp")
    assert (
        specs["rnn.weight_hh_l0"] == jax.P("tp", "dp")
        and specs["norm.running_mean"] == specs["rnn.bias_hh_l0"] == jax.P()
    )
    assert net.head.weight is net.embed.weight is optimizer.param_groups[0]["params"][0]
    assert isinstance(net.head.weight, nn.Parameter) and net.note.device.type == "cpu"
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name].cpu(), value)
    ids = torch.arange(8)
    torch.testing.assert_close(net(ids.to("jax")).cpu(), plain(ids))
    other = distributed.to_device_mesh(GRID)
    distributed.shard_module(net, other, lambda name, tensor: jax.P("dp") if tensor.ndim == 2 else None)
    assert layout(net.embed.weight).spec == jax.P("dp")


def test_shard_module_moves_one_tensor_at_a_time(monkeypatch):
    """While one is copied, those before it are on the devices, and those after it still on the CPU."""
    from torchax_core.distributed import modules

    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    seen = []
    monkeypatch.setattr(
        modules,
        "array_from_torch",
        lambda tensor, sharding: (
            seen.append([w.device.type for w in net.parameters()]) or modules.jax.device_put(tensor.numpy(), sharding)
        ),
    )
    distributed.shard_module(net, GRID, {"*": jax.P("tp")})
    assert seen == [["jax"] * i + ["cpu"] * (3 - i) for i in range(3)]


def test_a_module_on_meta_is_made_in_its_parts():
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(256, 512), nn.LSTM(512, 16), nn.BatchNorm1d(16), nn.TransformerEncoderLayer(16, 2, 32)
        )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    distributed.shard_module(net, MESH, {"0.weight": jax.P("x"), "1.weight_ih_l0": jax.P("x")})
    assert layout(net[0].weight).spec == jax.P("x") and net[0].weight is optimizer.param_groups[0]["params"][0]
    assert abs(net[0].weight.std().item() * 256**0.5 - 3**-0.5) < 0.02  # uniform over +- 1 / sqrt(256)
    assert net[2].running_var.tolist() == [1] * 16 and net[3].norm1.weight.tolist() == [1] * 16
    assert net[3].self_attn.in_proj_weight.abs().max() > 0 and net[1](torch.ones(2, 512, device="jax"))[0].shape == (
        2,
        16,
    )


def test_sharded_initialisation_holds_no_whole_weight(monkeypatch):
    """The program that makes the weights: nothing in it, arguments and results included, is as large as one of them."""
    from torchax_core.distributed import modules

    sizes = []

    def lowered(function, options):
        program = jax_jit(function, options)
        analysis = program.lower().compile().memory_analysis()
        sizes.append(analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes)
        return program

    jax_jit = modules.jax_jit
    monkeypatch.setattr(modules, "jax_jit", lowered)
    with torch.device("meta"):
        net = nn.Linear(1024, 1024, bias=False)
    distributed.shard_module(net, MESH, {"weight": jax.P("x")})
    assert sizes[0] < net.weight.nbytes


def test_meta_needs_values():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(8.0))

    with torch.device("meta"):
        net = Table()
    with pytest.raises(ValueError, match="table on device 'meta' got no values from _reset"):
        distributed.shard_module(net, MESH, {})
    assert net.linear.weight.device.type == net.table.device.type == "meta"

    def init(part):
        if isinstance(part, Table):
            part.table.data.fill_(3)
        else:
            part.reset_parameters()

    distributed.shard_module(net, MESH, {"table": jax.P("x")}, init=init)
    assert net.table.tolist() == [3] * 8 and layout(net.table).spec == jax.P("x")
    made = Mesh(MESH, {"table": jax.P("x")}).initialize_model_sharded(Table, ())
    assert made.table.tolist() == [*range(8)] and layout(made.table).spec == jax.P("x")


@pytest.mark.parametrize(
    ("rules", "options", "error", "message"),
    [
        ({"embed.weigth": None}, {}, ValueError, "rule 'embed.weigth' matches no tensor .* such as embed.weight"),
        (
            {"embed.weight": jax.P("x")},
            {},
            ValueError,
            r"'embed.weight': P\('x',\) names axis 'x', but the mesh has the axes",
        ),
        (
            [("*", jax.P("tp"))],
            {},
            ValueError,
            r"the rule '\*' for 'norm.num_batches_tracked': .* speaks of 1 dimensions, but",
        ),
        ({"embed.weight": jax.P(("dp", "tp"), "dp")}, {}, ValueError, "names axis 'dp' twice"),
        (
            {"rnn.bias_*": jax.P("tp")},
            {"unmatched": "error"},
            ValueError,
            r"no rule matches embed.weight, .*\('\*', None\)",
        ),
        ({"embed.weight": "tp"}, {}, TypeError, "expected jax.P.* but got 'tp'"),
        ({"*": None}, {"unmatched": "ignore"}, ValueError, "'replicate', 'error', not 'ignore'"),
    ],
)
def test_rules_that_do_not_fit(rules, options, error, message):
    net = Net()
    with pytest.raises(error, match=message):
        distributed.shard_module(net, GRID, rules, **options)
    assert {tensor.device.type for tensor in net.state_dict().values()} == {"cpu"}


def test_a_dimension_that_does_not_divide():
    with pytest.raises(
        ValueError, match=r"splits dimension 0 of shape \(6, 3\) over 4 devices, but 6 is no multiple of 4. Pad"
    ):
        distributed.shard_module(nn.Linear(3, 6), GRID, {"weight": jax.P("tp")})
    with pytest.raises(TypeError, match="expected a mesh, .* but got 'tp'"):
        distributed.shard_module(nn.Linear(3, 6), "tp", {})


class Attention(nn.Module):
    """Causal, with a matrix each for q, k and v."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


def test_tensor_parallel_attention_sends_nothing_but_sums():
    """One all-reduce after the rows of `out`, and, back, one for the input of q, k and v."""
    plain = nn.Sequential(nn.Embedding(8, 32), Attention(32, 8))
    columns, out = "*.[qkv].weight", "*.out.weight"
    net = distributed.shard_module(copy.deepcopy(plain), MESH, {columns: jax.P("x"), out: jax.P(None, "x")})

    @torchax_core.jit
    def step(ids):
        net.zero_grad()
        loss = net(ids).square().mean()
        loss.backward()
        return loss

    ids = torch.randint(0, 8, (2, 6))
    loss = step(distributed.distribute_tensor(ids, MESH))
    expected = plain(ids).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    program = step.lower(distributed.distribute_tensor(ids, MESH)).compile().as_text()
    sent = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    assert set(sent) == {"all-reduce"}


# -- code for each device ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rules", "jit"), [({}, False), ({"0.weight": jax.P("x")}, True)])
def test_shard_map_over_a_module(rules, jit):
    """Weights closed over are whole on every device, and get the gradients of all devices' parts."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    net = distributed.shard_module(copy.deepcopy(plain), MESH, rules)

    def mean(x):
        return interop.call_jax(jax.lax.pmean, net(x).square().mean(), "x")

    run = interop.jax_shard_map(
        mean, {"mesh": jax.make_mesh((8,), ("x",)), "in_specs": jax.P("x"), "out_specs": jax.P()}
    )

    def step(x):
        loss = run(x)
        loss.backward()
        return loss

    x = torch.randn(16, 4)
    loss = (torchax_core.jit(step) if jit else step)(distributed.distribute_tensor(x, MESH, jax.P("x")))
    expected = plain(x).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


# -- checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_go_from_layout_to_layout(tmp_path):
    """Eight devices, eight with another layout, one: each takes up the bits of the one before, where its own are to lie."""

    def make(rules):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        net = net.to("jax") if rules is None else distributed.shard_module(net, GRID, rules)
        return {"net": net, "optimizer": torch.optim.AdamW(net.parameters())}

    def step(state):
        state["optimizer"].zero_grad()
        state["net"](torch.ones(2, 8, device="jax")).sum().backward()
        state["optimizer"].step()

    def values(state):
        moments = [v["exp_avg"].cpu() for v in state["optimizer"].state.values()]
        return [*(p.detach().cpu() for p in state["net"].parameters()), *moments]

    first = make({"*.weight": jax.P("dp", "tp")})
    torchax_core.jit(lambda: step(first))()
    layouts = [{"*.weight": jax.P("tp"), "*.bias": jax.P("dp")}, None]
    for number, rules in enumerate(layouts):
        torchax_core.save_checkpoint(first, tmp_path, number)
        second = make(rules)
        torchax_core.load_checkpoint(tmp_path, into=second)
        assert all(map(torch.equal, values(first), values(second)))
        for weight in second["net"].parameters():
            expected = None if rules is None else NamedSharding(GRID, jax.P("tp" if weight.ndim == 2 else "dp"))
            assert layout(weight) == layout(second["optimizer"].state[weight]["exp_avg"]) == expected
        step(first)
        step(second)
        for a, b in zip(values(first), values(second), strict=True):
            torch.testing.assert_close(a, b)
        first = second


# -- the page ------------------------------------------------------------------------------------------


def test_the_page_runs():
    """docs/distributed.md: its programs, one after the other."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 5
    names = {}
    for program in programs:
        exec(program, names)
    weight = names["model"][0].up.weight
    assert layout(weight).spec == layout(weight.grad).spec == jax.P("tp")
    assert layout(names["optimizer"].state[names["model"][1].down.weight]["exp_avg"]).spec == jax.P(None, "tp")
    assert layout(names["made"].up.weight).spec == jax.P("tp")
