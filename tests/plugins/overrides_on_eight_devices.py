"""Overridden collectives inside jax.shard_map: tests/core/test_overrides.py's combinations. Run by test_collectives.py."""

import contextlib
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import torchax_core
from torchax_core import Environment, default_env, interop
from torchax_core.errors import OpNameError
from torchax_ops_c10d import init_single_process

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from test_overrides import everywhere, for_a_block, in_environment, in_thread

ENV = default_env()
MEMBERS = 2  # enough, and cheaper than all
MESH = jax.make_mesh((MEMBERS,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:MEMBERS])
VALUES = np.random.default_rng(0).integers(1, 9, (MEMBERS, 8)).astype(np.float32)
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::FutureWarning")


@pytest.fixture(autouse=True, scope="module")
def world():
    init_single_process(MEMBERS)
    yield
    dist.destroy_process_group()


def all_reduce(t):
    return funcol.all_reduce(t, "sum", dist.group.WORLD)


def in_place(t):
    t = t.clone()
    c10d.all_reduce_(t, "sum", "0")
    return t


def written(t):
    t = t * 1  # not the argument, and not what a derivative is taken by
    dist.all_reduce(t)
    return t


def all_gather(t):
    return funcol.all_gather_tensor(t, 0, dist.group.WORLD)


def reduce_scatter(t):
    return funcol.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD)


def all_to_all(t):
    return funcol.all_to_all_single(t, None, None, dist.group.WORLD)


def broadcast(t):
    return funcol.broadcast(t, 1, dist.group.WORLD)


def exchanged(values):
    return values.reshape(MEMBERS, MEMBERS, -1).swapaxes(0, 1).reshape(MEMBERS, -1)


def on_all(row):
    return np.broadcast_to(row, (MEMBERS, *row.shape))


# name of the op; how to call it; what it gives, of (members, n), and what it gives overridden; an override in JAX and one in
# torch code; with all of them in force, the gradient for cotangents (members, m): by torch's formula, which calls collectives
# that are overridden too, and, where jax differentiates the program, that of the override
TARGETS = {
    "all_reduce": (
        "_c10d_functional::all_reduce",
        all_reduce,
        lambda v: on_all(v.sum(0)),
        lambda v: 3 * on_all(v.mean(0)),
        lambda input, reduce_op, group_name: 3 * jax.lax.pmean(input, "x"),
        lambda input, reduce_op, group_name: 3 * c10d.all_reduce(input, "avg", group_name),
        lambda c: 3 * on_all(c.mean(0)),
    ),
    "all_reduce_": (
        "_c10d_functional::all_reduce",
        in_place,
        lambda v: on_all(v.sum(0)),
        lambda v: 3 * on_all(v.mean(0)),
        lambda input, reduce_op, group_name: 3 * jax.lax.pmean(input, "x"),
        lambda input, reduce_op, group_name: 3 * c10d.all_reduce(input, "avg", group_name),
        None,
    ),
    "all_gather_tensor": (
        "_c10d_functional::all_gather_into_tensor",
        all_gather,
        lambda v: on_all(v.reshape(-1)),
        lambda v: on_all(-v.reshape(-1)),
        lambda input, group_size, group_name: -jax.lax.all_gather(input, "x", tiled=True),
        lambda input, group_size, group_name: -c10d.all_gather_into_tensor(input, group_size, group_name),
        lambda c: -c.sum(0).reshape(MEMBERS, -1),
    ),
    "reduce_scatter_tensor": (
        "_c10d_functional::reduce_scatter_tensor",
        reduce_scatter,
        lambda v: v.sum(0).reshape(MEMBERS, -1),
        lambda v: -v.sum(0).reshape(MEMBERS, -1),
        lambda input, reduce_op, group_size, group_name: -jax.lax.psum_scatter(input, "x", tiled=True),
        lambda input, reduce_op, group_size, group_name: (
            -c10d.reduce_scatter_tensor(input, "sum", group_size, group_name)
        ),
        lambda c: on_all(-c.reshape(-1)),
    ),
    "all_to_all_single": (
        "_c10d_functional::all_to_all_single",
        all_to_all,
        exchanged,
        lambda v: -exchanged(v),
        lambda input, output_split_sizes, input_split_sizes, group_name: (
            -jax.lax.all_to_all(input, "x", 0, 0, tiled=True)
        ),
        lambda input, *rest: -c10d.all_to_all_single(input, *rest),
        lambda c: -exchanged(c),
    ),
    "broadcast": (
        "_c10d_functional::broadcast",
        broadcast,
        lambda v: on_all(v[1]),
        lambda v: on_all(-v[1]),
        lambda input, src, group_name: -jax.lax.all_gather(input, "x")[src],
        lambda input, src, group_name: -c10d.broadcast(input, src, group_name),
        None,
    ),
}


def c10d_all_reduce(tensors, process_group, reduce_op, *rest):
    """What torch.distributed.all_reduce calls: in place, and with a Work."""
    result = torch.ops.c10d.allreduce_(tensors, process_group, reduce_op, *rest)
    for tensor in tensors:
        tensor.copy_(interop.call_jax(jnp.negative, tensor))
    return result


def function_all_reduce(tensor, op=None, group=None, async_op=False):
    dist.all_reduce(tensor, group=group)
    tensor.neg_()


IN_PLACE = {"c10d::allreduce_": c10d_all_reduce}
if torch.__version__ >= (2, 14):  # before, torch.distributed asks no tensor
    IN_PLACE["torch.distributed.all_reduce"] = function_all_reduce
SUM = on_all(VALUES.sum(0))


def one_by_one(function, jax_view=interop.jax_view):
    """A torch function of a member's values on its part of (members, ...)."""
    return lambda part: jax.tree.map(lambda y: y[None], jax_view(function)(part[0]))


def numpy(results):
    return {
        name: np.asarray(result.cpu() if isinstance(result, torch.Tensor) else result)
        for name, result in results.items()
    }


def mapped(function):
    """A torch function of all members' values."""

    return interop.jax_shard_map(
        one_by_one(function, jax_view=lambda f: f),
        {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x"), "check_vma": False},
    )


def tensor(values=VALUES):
    return torch.from_numpy(values.copy()).to("jax")


def cotangents(values, like):
    """Different ones for every member."""
    return np.arange(like.shape[1], dtype=np.float32) + values.sum(1, keepdims=True)


def gradient_of(call):
    def gradient(t):
        y = t.clone().requires_grad_()
        out = call(y)
        out.backward(torch.arange(out.numel(), device="jax", dtype=t.dtype) + t.sum())
        return y.grad

    return gradient


def same(ours, expected):
    np.testing.assert_array_equal(ours.detach().cpu().numpy(), expected)


def every(t):
    """All targets in one program."""
    return {target: call(t) for target, (_, call, *_) in TARGETS.items()}


def every_gradient(t):
    return {target: gradient_of(call)(t) for target, (_, call, *_, gradient) in TARGETS.items() if gradient is not None}


def check_every(results, column, *values):
    for target, result in results.items():
        np.testing.assert_array_equal(result, TARGETS[target][column](*values), err_msg=target)


@contextlib.contextmanager
def all_overridden(where, is_jax_function):
    environment = Environment()
    with contextlib.ExitStack() as stack:
        for op, *_, in_jax, in_torch, _ in {t[0]: t for t in TARGETS.values()}.values():
            impl = in_jax if is_jax_function else in_torch
            if where is in_environment:
                environment.override_op_definition(op, impl, is_jax_function=is_jax_function)
            else:
                stack.enter_context(where(op, impl, is_jax_function))
        if where is in_environment:
            stack.enter_context(environment)
        yield


@pytest.mark.parametrize("is_jax_function", [True, False], ids=["jax", "torch"])
@pytest.mark.parametrize("where", [everywhere, in_environment, for_a_block, in_thread], ids=lambda f: f.__name__)
def test_every_combination(where, is_jax_function):
    x, compiled = tensor(), torchax_core.jit(mapped(every))
    compiled_gradient = torchax_core.jit(mapped(every_gradient))

    @torchax_core.jit
    def compiled_outer(x, given):
        """The sum of the same gradients, where jax differentiates the program."""
        x = x.detach().requires_grad_()
        results = {target: y for target, y in mapped(every)(x).items() if TARGETS[target][-1] is not None}
        return torch.autograd.grad(list(results.values()), x, [given[target] for target in results])[0]

    check_every(numpy(compiled(x)), 2, VALUES)

    def check():
        check_every(numpy(compiled(x)), 3, VALUES)
        if where is not for_a_block:
            return
        check_every(numpy(mapped(every)(x)), 3, VALUES)
        per_device = jax.shard_map(one_by_one(every), mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        check_every(numpy(per_device(jnp.asarray(VALUES))), 3, VALUES)  # without jit, each op by itself
        given = {target: cotangents(VALUES, plain(VALUES)) for target, (_, _, plain, *_) in TARGETS.items()}
        gradients = numpy(compiled_gradient(x))
        wanted = {target: TARGETS[target][-1](given[target]) for target in gradients}
        for target, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, wanted[target], err_msg=target)
        given = {target: tensor(cotangent) for target, cotangent in given.items()}
        np.testing.assert_allclose(compiled_outer(x, given).cpu().numpy(), sum(wanted.values()), rtol=1e-6)

    if where is in_thread:

        def in_its_own_environment():
            with all_overridden(in_environment, is_jax_function):
                check()

        in_thread(in_its_own_environment)
    else:
        with all_overridden(where, is_jax_function):
            check()
    check_every(numpy(compiled(x)), 2, VALUES)


@pytest.mark.parametrize("is_jax_function", [True, False], ids=["jax", "torch"])
def test_vmap_compile_and_torch_func(is_jax_function):
    op, call, plain, overridden, in_jax, in_torch, _ = TARGETS["all_reduce"]
    x, rows = tensor(), VALUES.reshape(MEMBERS, 2, 4)
    compiled = torch.compile(mapped(call), backend="torchax")
    same(compiled(x), plain(VALUES))
    with ENV.override_op_definition(op, in_jax if is_jax_function else in_torch, is_jax_function=is_jax_function):
        same(compiled(x), overridden(VALUES))
        same(mapped(torch.compile(call, backend="torchax"))(x), overridden(VALUES))
        same(mapped(torch.func.vmap(call))(tensor(rows)), overridden(rows))
        with pytest.raises(RuntimeError, match="setup_context"):  # torch's, of its own formula: on the CPU too
            mapped(torch.func.grad(lambda t: call(t).sum()))(x)
    same(compiled(x), plain(VALUES))


@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("where", [everywhere, in_environment, for_a_block, in_thread], ids=lambda f: f.__name__)
def test_what_torch_distributed_calls(op, where):
    x, eager, compiled = tensor(), mapped(written), torchax_core.jit(mapped(written))
    same(compiled(x), SUM)

    def check():
        same(eager(x), -SUM)
        same(compiled(x), -SUM)

    if where is in_thread:

        def in_its_own_environment():
            with in_environment(op, IN_PLACE[op], False):
                check()

        in_thread(in_its_own_environment)
    else:
        with where(op, IN_PLACE[op], False):
            check()
    same(eager(x), SUM)
    same(compiled(x), SUM)


CHAINS = {
    "_c10d_functional::all_reduce": (all_reduce, lambda v: lambda *a, **k: next(iter((*a, *k.values()))) * 0 + v),
    "c10d::allreduce_": (
        written,
        lambda v: lambda tensors, *a: (torch.ops.c10d.allreduce_(tensors, *a), [t.fill_(v) for t in tensors])[0],
    ),
    "torch.distributed.all_reduce": (written, lambda v: lambda tensor, *a, **k: tensor.fill_(v)),
}
if "torch.distributed.all_reduce" not in IN_PLACE:
    del CHAINS["torch.distributed.all_reduce"]


@pytest.mark.parametrize("op", CHAINS)
def test_undone_in_any_order(op):
    call, giving = CHAINS[op]
    x, compiled = tensor(), torchax_core.jit(mapped(call))
    for order in itertools.permutations(range(3)):
        handles = [
            ENV.override_op_definition(op, giving(v), is_jax_function=op.startswith("_c10d") and v != 20)
            for v in (10, 20, 30)
        ]
        left = {0: 10.0, 1: 20.0, 2: 30.0}
        for at in order:
            same(compiled(x), np.full_like(VALUES, left[max(left)]))
            chain = ENV.explain(op).chain
            origins = [source.origin for source in chain if source.level == "override"]
            assert len(origins) == len(left) and all("overrides_on_eight_devices.py" in origin for origin in origins)
            if "::" in op:
                assert any(s.level == "pack" and "torchax_ops_c10d" in s.origin for s in chain[len(left) :])
            handles[at].undo()
            del left[at]
        same(compiled(x), SUM)


@pytest.mark.parametrize("op", CHAINS)
def test_declining_asks_the_next_and_what_it_raises_arrives(op):
    call, giving = CHAINS[op]
    x, asked = tensor(), []

    def declining(number):
        def decline(*args, **kwargs):
            asked.append(number)
            return NotImplemented

        return decline

    kinds = [True, False, True] if op.startswith("_c10d") else [False] * 3
    with contextlib.ExitStack() as stack:
        for number, is_jax_function in enumerate(kinds):
            stack.enter_context(ENV.override_op_definition(op, declining(number), is_jax_function=is_jax_function))
        same(mapped(call)(x), SUM)
        assert asked[:3] == [2, 1, 0], "the newest first, each once"
        same(torchax_core.jit(mapped(call))(x), SUM)
    with ENV.override_op_definition(op, giving(7)), ENV.override_op_definition(op, declining(9)):
        same(mapped(call)(x), np.full_like(VALUES, 7))

    def failing(*args, **kwargs):
        raise ZeroDivisionError("by the override")

    compiled = torchax_core.jit(mapped(call))
    for is_jax_function in dict.fromkeys(kinds):
        with ENV.override_op_definition(op, failing, is_jax_function=is_jax_function):
            for program in (mapped(call), compiled):
                with pytest.raises(ZeroDivisionError, match="by the override"):
                    program(x)
    same(compiled(x), SUM)


def test_what_no_jax_function_can_be():
    with ENV.override_op_definition("c10d::allreduce_", lambda tensors, *rest: tensors, is_jax_function=True):
        with pytest.raises(OpNameError, match="returns a Work, which a JAX function cannot make. Override it by torch"):
            mapped(written)(tensor())
    same(mapped(written)(tensor()), SUM)
