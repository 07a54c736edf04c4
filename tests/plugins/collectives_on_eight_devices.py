"""torchax_ops_c10d.collectives inside jax.shard_map, against the definitions in numpy. Run by test_collectives.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import init_device_mesh

from torchax_core.errors import ShapeError
from torchax_core.interop import jax_view, torch_view
from torchax_ops_c10d import (
    CollectiveError,
    average_gradients,
    init_single_process,
    map_group,
    permute_tensor,
    ragged_all_to_all,
)

MEMBERS, ROWS = 8, 16
c10d = torch.ops._c10d_functional
line = jax.make_mesh((MEMBERS,), ("x",), axis_types=(AxisType.Auto,))
plane = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
map_group("line", "x")
map_group("rows", "a")
map_group("columns", "b")
map_group("plane", ("a", "b"))


def shards(dtype=np.float32, rows=ROWS):
    """What each member holds: (members, rows, 2), small whole numbers."""
    return np.random.default_rng(0).integers(1, 4, (MEMBERS, rows, 2)).astype(dtype)


def run(per_device, values, *, mesh=line, jit=True):
    """`per_device` (torch code) on each member's own values; what each returns, (members, ...)."""
    spec = P(mesh.axis_names)
    program = jax.shard_map(
        lambda x: jax_view(per_device)(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return np.asarray((jax.jit(program) if jit else program)(jnp.asarray(values)))


REDUCTIONS = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("reduce_op", REDUCTIONS)
def test_all_reduce(reduce_op):
    values = shards(np.int32 if reduce_op.startswith("b") else np.float32)
    expected = np.broadcast_to(REDUCTIONS[reduce_op](values, axis=0), values.shape)
    np.testing.assert_allclose(run(lambda t: c10d.all_reduce(t, reduce_op, "line"), values), expected, rtol=1e-6)
    np.testing.assert_allclose(run(lambda t: funcol.all_reduce(t, reduce_op, "line"), values), expected, rtol=1e-6)


def test_all_reduce_of_bools():
    values = shards() > 2
    for reduce_op, expected in {"sum": values.any(0), "band": values.all(0)}.items():
        got = run(lambda t, r=reduce_op: c10d.all_reduce(t, r, "line"), values)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, np.broadcast_to(expected, values.shape))


def test_all_reduce_in_place():
    def per_device(t):
        t = t.clone()
        assert c10d.all_reduce_(t, "sum", "line") is t
        return t

    np.testing.assert_array_equal(run(per_device, shards())[3], shards().sum(0))


def test_all_reduce_coalesced():
    def per_device(t):
        one, other = c10d.all_reduce_coalesced([t, t[0]], "sum", "line")
        return one + other

    np.testing.assert_array_equal(run(per_device, shards())[2], shards().sum(0) + shards().sum(0)[0])


def test_all_gather():
    values = shards(rows=3)
    gathered = values.reshape(-1, 2)
    np.testing.assert_array_equal(run(lambda t: c10d.all_gather_into_tensor(t, 8, "line"), values)[5], gathered)
    np.testing.assert_array_equal(
        run(lambda t: c10d.all_gather_into_tensor(t[1, 1], 8, "line"), values)[5], values[:, 1, 1]
    )
    np.testing.assert_array_equal(
        run(lambda t: c10d.all_gather_into_tensor_coalesced([t, t + 1], 8, "line")[1], values)[0], gathered + 1
    )

    def into(t):
        out = torch.zeros(24, 2, device="jax")
        c10d.all_gather_into_tensor_out(t, 8, "line", out=out)
        return out

    np.testing.assert_array_equal(run(into, values)[7], gathered)


@pytest.mark.parametrize("reduce_op", REDUCTIONS)
def test_reduce_scatter(reduce_op):
    values = shards(np.int32 if reduce_op.startswith("b") else np.float32)
    expected = REDUCTIONS[reduce_op](values, axis=0).reshape(MEMBERS, ROWS // MEMBERS, 2)
    got = run(lambda t: c10d.reduce_scatter_tensor(t, reduce_op, 8, "line"), values)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_reduce_scatter_other_forms():
    expected = shards().sum(0).reshape(MEMBERS, ROWS // MEMBERS, 2)
    got = run(lambda t: c10d.reduce_scatter_tensor_coalesced([t, 2 * t], "sum", 8, "line")[1], shards())
    np.testing.assert_array_equal(got, 2 * expected)

    def into(t):
        out = torch.zeros(2, 2, device="jax")
        c10d.reduce_scatter_tensor_out(t, "sum", 8, "line", out=out)
        return out

    np.testing.assert_array_equal(run(into, shards()), expected)
    with pytest.raises(ShapeError, match="divide into 8 parts"):
        run(lambda t: c10d.reduce_scatter_tensor(t, "sum", 8, "line"), shards(rows=9))


def test_all_to_all():
    values = shards()
    expected = values.reshape(MEMBERS, MEMBERS, 2, 2).swapaxes(0, 1).reshape(values.shape)
    got = run(lambda t: c10d.all_to_all_single(t, [2] * 8, [2] * 8, "line"), values)
    np.testing.assert_array_equal(got, expected)
    uneven = [4, 0, *[2] * 6]
    with pytest.raises(CollectiveError, match="all parts must have one size"):
        run(lambda t: c10d.all_to_all_single(t, uneven, uneven, "line"), values)


def test_broadcast():
    values = shards()
    values[0] = np.nan
    got = run(lambda t: funcol.broadcast(t, 3, "line"), values)
    np.testing.assert_array_equal(got, np.broadcast_to(values[3], values.shape))
    got = run(lambda t: c10d.broadcast(t > 2, 3, "line"), values)
    np.testing.assert_array_equal(got[6], values[3] > 2)
    with pytest.raises(CollectiveError, match="`src`.*0 to 7, but is 8"):
        run(lambda t: c10d.broadcast(t, 8, "line"), values)


def test_wait():
    np.testing.assert_array_equal(run(lambda t: funcol.wait_tensor(t), shards()), shards())


def test_groups_of_a_mesh_with_two_axes():
    values = shards()
    by_axis = values.reshape(2, 4, ROWS, 2)

    def per_device(t):
        return torch.stack([c10d.all_reduce(t, "sum", group) for group in ("rows", "columns", "plane")])

    got = run(per_device, values, mesh=plane).reshape(2, 4, 3, ROWS, 2)
    np.testing.assert_array_equal(got[1, 2, 0], by_axis[:, 2].sum(0))
    np.testing.assert_array_equal(got[1, 2, 1], by_axis[1].sum(0))
    np.testing.assert_array_equal(got[1, 2, 2], values.sum(0))
    gathered = run(lambda t: c10d.all_gather_into_tensor(t, 8, "plane"), values, mesh=plane)
    np.testing.assert_array_equal(gathered[0], values.reshape(-1, 2))


def test_without_jit():
    got = run(lambda t: c10d.all_reduce(t, "sum", "line"), shards(), jit=False)
    np.testing.assert_array_equal(got[0], shards().sum(0))


def test_gradients():
    values = shards()

    def gradient_of(collective):
        def per_device(t):
            t = t.clone().requires_grad_()
            (collective(t * t) * torch.arange(2.0, device="jax")).sum().backward()
            return t.grad

        return run(per_device, values)

    # each member's loss counts in every member's gradient, as with processes
    weights = np.arange(2.0)
    np.testing.assert_array_equal(gradient_of(lambda t: c10d.all_reduce(t, "sum", "line")), 2 * values * 8 * weights)
    if torch.__version__ >= (2, 14):  # before, torch's own formula refuses all but "sum"
        np.testing.assert_array_equal(gradient_of(lambda t: c10d.all_reduce(t, "avg", "line")), 2 * values * weights)
    gathered = gradient_of(lambda t: c10d.all_gather_into_tensor(t, 8, "line"))
    np.testing.assert_array_equal(gathered, 2 * values * 8 * weights)
    scattered = gradient_of(lambda t: c10d.reduce_scatter_tensor(t, "sum", 8, "line"))
    np.testing.assert_array_equal(scattered, 2 * values * weights)


def test_a_wrong_group_size():
    with pytest.raises(CollectiveError, match="has 4 members, but it is the mesh axis 'x', which has 8"):
        run(lambda t: c10d.all_gather_into_tensor(t, 4, "line"), shards())


def test_tensor_parallel_layers():
    """Megatron's pair: the first weight split by columns, the second by rows, one all_reduce."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 6)).astype(np.float32)
    first = generator.standard_normal((6, 16)).astype(np.float32)
    second = generator.standard_normal((16, 3)).astype(np.float32)

    def per_device(x, first, second):
        return funcol.all_reduce(torch.relu(x @ first) @ second, "sum", "line")

    program = jax.jit(
        jax.shard_map(jax_view(per_device), mesh=line, in_specs=(P(), P(None, "x"), P("x")), out_specs=P())
    )
    np.testing.assert_allclose(program(x, first, second), np.maximum(x @ first, 0) @ second, rtol=1e-4, atol=1e-4)


def test_process_groups():
    """Functions that ask torch.distributed how large a group is need one of that name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MEMBERS)
    try:
        map_group(dist.group.WORLD, "x")
        values = shards()
        got = run(lambda t: funcol.all_gather_tensor(t, 0, dist.group.WORLD), values)
        np.testing.assert_array_equal(got[1], values.reshape(-1, 2))
        got = run(lambda t: funcol.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD), values)
        np.testing.assert_array_equal(got.reshape(ROWS, 2), values.sum(0))
        got = run(lambda t: funcol.all_to_all_single(t, None, None, dist.group.WORLD), values)
        np.testing.assert_array_equal(got[0, 2:4], values[1, :2])
        with pytest.raises(CollectiveError, match="not in scope"):
            funcol.all_reduce(torch.ones(2, device="jax"), "sum", dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def world():
    """The backend "jax" over the devices of this process."""
    init_single_process()
    yield
    dist.destroy_process_group()


def test_groups_find_their_axis(world):
    """The default group is all axes in scope, and a dimension of a DeviceMesh the axis of its name."""
    assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (MEMBERS, 0, "jax")
    dims = init_device_mesh("jax", (2, 4), mesh_dim_names=("a", "b"))
    values = shards()
    by_axis = values.reshape(2, 4, ROWS, 2)

    def per_device(t):
        everyone, row, column = t.clone(), t.clone(), t.clone()
        dist.all_reduce(everyone)
        dist.all_reduce(row, group=dims.get_group("a"))
        dist.broadcast(column, group=dims.get_group("b"), group_src=3)
        return torch.stack([everyone, row, column, funcol.all_reduce(t, "sum", dims["b"])])

    got = run(per_device, values, mesh=plane).reshape(2, 4, 4, ROWS, 2)
    np.testing.assert_array_equal(got[1, 2, 0], values.sum(0))
    np.testing.assert_array_equal(got[1, 2, 1], by_axis[:, 2].sum(0))
    np.testing.assert_array_equal(got[1, 2, 2], by_axis[1, 3])
    np.testing.assert_array_equal(got[1, 2, 3], by_axis[1].sum(0))
    # the same code, and another mesh: nothing was remembered
    other = jax.make_mesh((MEMBERS,), ("other",), axis_types=(AxisType.Auto,))
    got = run(lambda t: funcol.all_reduce(t, "sum", dist.group.WORLD), values, mesh=other)
    np.testing.assert_array_equal(got[4], values.sum(0))
    with pytest.raises(CollectiveError, match="has 2 members, but device 'jax' is one logical device"):
        run(lambda t: funcol.all_reduce(t, "sum", dims["a"]), values, mesh=line)


def test_permute(world):
    values = shards()
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    got = run(lambda t: permute_tensor(t, order, dist.group.WORLD), values)
    np.testing.assert_array_equal(got, values[order])

    def gradient(t):
        t = t.clone().requires_grad_()
        weight = torch.arange(8.0, device="jax")[torch.distributed.get_rank()]
        (permute_tensor(t * t, [1, 2, 3, 4, 5, 6, 7, 0], dist.group.WORLD) * (t.detach() + weight)).sum().backward()
        return t.grad

    # member i's square is multiplied, on member i + 1, by that one's own value
    np.testing.assert_array_equal(run(gradient, values), 2 * values * np.roll(values, -1, axis=0))
    with pytest.raises(CollectiveError, match="must be a permutation of the members"):
        run(lambda t: permute_tensor(t, [0] * 8, dist.group.WORLD), values)


def test_parts_of_different_lengths(world):
    values = shards(rows=20)
    counts = np.random.default_rng(1).integers(0, 4, (MEMBERS, MEMBERS))  # from i, to j
    counts[2], counts[:, 5] = 0, 0  # one sends nothing, another receives nothing
    sent = [np.split(values[i], np.cumsum(counts[i])) for i in range(MEMBERS)]
    table = torch.from_numpy(counts).to("jax")

    def send(t):
        mine = table.index_select(0, torch_view(jax.lax.axis_index("x"))[None])[0]
        out, received = ragged_all_to_all(t, mine, dist.group.WORLD, longest=3, rows=24)
        assert received.dtype == torch.int32
        return out, received

    got = run(lambda t: send(t)[0], values)
    received = run(lambda t: send(t)[1], values)
    np.testing.assert_array_equal(received, counts.T)
    for j in range(MEMBERS):
        rows = np.concatenate([sent[i][j] for i in range(MEMBERS)])
        np.testing.assert_array_equal(got[j, : len(rows)], rows)
        assert not got[j, len(rows) :].any()

    def gradient(t):
        t = t.clone().requires_grad_()
        out, _ = send(t * t)
        (out * torch.arange(24.0, device="jax")[:, None]).sum().backward()
        return t.grad

    got = run(gradient, values)
    for i in range(MEMBERS):
        starts = [counts[:i, j].sum() for j in range(MEMBERS)]
        weights = np.concatenate([starts[j] + np.arange(counts[i, j]) for j in range(MEMBERS)])
        np.testing.assert_array_equal(got[i, : len(weights)], 2 * values[i, : len(weights)] * weights[:, None])
        assert not got[i, len(weights) :].any()
    with pytest.raises(ShapeError, match="one number of rows for each of the 8 members, but its shape is \\(3,\\)"):
        run(lambda t: ragged_all_to_all(t, table[0, :3], dist.group.WORLD, longest=3, rows=24)[0], values)


def test_a_batch_of_sends_is_a_shift(world):
    values = shards()

    def exchange(*shifts):
        def per_device(t):
            outs = [torch.zeros_like(t) for _ in shifts]
            ops = [dist.P2POp(dist.isend, t + i, to) for i, (to, _) in enumerate(shifts)]
            ops += [dist.P2POp(dist.irecv, out, source) for out, (_, source) in zip(outs, shifts, strict=True)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return torch.stack(outs)

        return run(per_device, values)

    got = exchange((1, 7), (5, 3))  # both neighbours of a halo, and beyond
    np.testing.assert_array_equal(got[:, 0], np.roll(values, 1, axis=0))
    np.testing.assert_array_equal(got[:, 1], np.roll(values, 5, axis=0) + 1)
    for pair in ((1, 1), (4, 4), (2, 7)):  # a swap of neighbours, a shift or a reflection, neither
        with pytest.raises(CollectiveError, match="permute_tensor"):
            exchange(pair)
    with pytest.raises(CollectiveError, match="permute_tensor"):
        run(lambda t: dist.send(t, 1), values)

    def functional(t):
        return c10d.batch_p2p_ops(["isend", "irecv"], [3, 5], [0, 0], [t, torch.zeros_like(t)], "0")[1]

    np.testing.assert_array_equal(run(functional, values), np.roll(values, 3, axis=0))


def test_average_gradients(world):
    values = shards()

    def per_device(t):
        weight, unused = t[0].clone().requires_grad_(), t[0].clone().requires_grad_()
        (weight * t[1]).sum().backward()
        average_gradients([weight, unused])
        assert unused.grad is None
        return weight.grad

    np.testing.assert_array_equal(run(per_device, values)[2], values[:, 1].mean(0))


def test_outside_of_a_program_the_devices_are_no_members(world):
    with pytest.raises(CollectiveError, match=r"[Rr]un this code inside jax.shard_map"):
        dist.all_reduce(torch.ones(2, device="jax"))


def test_only_rank_0_can_be_the_root_of_lists(world):
    with pytest.raises(CollectiveError, match="has no `gather_list` for the root 1"):
        run(lambda t: dist.gather(t, None, 1), shards())
    with pytest.raises(CollectiveError, match="has no `scatter_list` for the root 1"):
        run(lambda t: dist.scatter(t, None, 1), shards())


def test_signed_zeros_and_nans_survive_a_broadcast(world):
    values = np.array([[-0.0, np.nan, 1.0]] * MEMBERS, np.float32)

    def per_device(t):
        out = torch.zeros_like(t)
        dist.scatter(out, [t] * MEMBERS, 0)
        return torch.stack([funcol.broadcast(t, 2, dist.group.WORLD), out])

    for got in run(per_device, values)[5]:
        np.testing.assert_array_equal(got, values[0])
        np.testing.assert_array_equal(np.signbit(got[[0, 2]]), [True, False])


def test_jax_differentiates_a_broadcast(world):
    """jax.grad through torch code: every member's use of the value counts at its source."""
    weights = jnp.arange(1.0, MEMBERS + 1)

    def loss(x):
        def per_device(x, weight):
            value = jax_view(lambda t: funcol.broadcast(t, 2, dist.group.WORLD))(x)
            return jax.lax.psum((value * weight).sum(), "x")

        return jax.shard_map(per_device, mesh=line, in_specs=P("x"), out_specs=P(), check_vma=False)(x, weights)

    gradient = jax.grad(loss)(jnp.ones(MEMBERS))
    assert gradient[2] != 0 and not gradient[jnp.arange(MEMBERS) != 2].any()
    np.testing.assert_allclose(gradient / gradient[2], np.eye(MEMBERS)[2])
