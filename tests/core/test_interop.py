"""torchax_core.interop: values and calls across the bridge, jax's transformations of torch code, modules as jax functions."""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax_core
from torchax_core import interop, trees
from torchax_core.errors import ConversionError, ShapeError, SideEffectError


def close(ours, wanted) -> None:
    """Equal to the CPU's values, within float32's tolerance, dtype and shape included."""
    ours = torch.from_numpy(np.array(ours)) if isinstance(ours, jax.Array) else ours.detach().cpu()
    torch.testing.assert_close(ours, wanted.detach(), rtol=1e-4, atol=1e-5)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def both() -> tuple[nn.Module, nn.Module]:
    model = network()
    return copy.deepcopy(model).to("jax"), model


# -- values ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_views_share_memory_and_dtype(dtype) -> None:
    x = torch.ones(2, 3).to(dtype).to("jax")
    array = interop.jax_view(x)
    assert array is x.jax() and interop.jax_view(dtype) == array.dtype and interop.torch_view(array.dtype) is dtype
    back = interop.torch_view(array)
    assert back.dtype is dtype and back.jax() is array and back.device.type == "jax"


def test_views_of_trees_of_either_library() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    array = jnp.ones(2)
    tree = {"b": [array, None], "a": (3, "s"), "p": Pair(array, BaseModelOutput(last_hidden_state=array))}
    seen = interop.torch_view(tree)
    assert list(seen) == ["b", "a", "p"] and seen["a"] == (3, "s") and seen["b"][1] is None
    assert isinstance(seen["p"], Pair) and isinstance(seen["p"].b, BaseModelOutput)
    assert isinstance(seen["p"].b.last_hidden_state, torch.Tensor)
    assert interop.jax_view(seen)["p"].b.last_hidden_state is array
    state = optax.adam(1e-3).init({"w": array})
    leaves, spec = trees.flatten([state, tree])
    assert trees.flatten(trees.unflatten(leaves, spec))[1] == spec and hash(spec) is not None
    with pytest.raises(ValueError, match="more than the structure"):
        trees.unflatten([*leaves, 1], spec)


def test_views_of_callables() -> None:
    assert interop.jax_view(torch.sin)(jnp.ones(2)).dtype == jnp.float32
    assert isinstance(interop.torch_view(jnp.sin)(torch.ones(2, device="jax")), torch.Tensor)
    function = jnp.sin
    assert interop.jax_view(interop.torch_view(function)) is function
    assert interop.torch_view(interop.jax_view(torch.sin)) is torch.sin
    module = nn.ReLU()
    assert interop.torch_view(module) is module and interop.torch_view(interop.jax_view(module)) is module
    assert interop.jax_view(module)(jnp.array([-1.0, 1.0])).tolist() == [0, 1]
    mesh = jax.make_mesh((1,), ("x",))
    assert interop.jax_view(mesh) is mesh and interop.jax_view(int) is int


def test_what_has_no_counterpart() -> None:
    with pytest.raises(ConversionError, match=r"on device cpu.*\.to\('jax'\)"):
        interop.jax_view([torch.ones(2)])
    with pytest.raises(ConversionError, match="takes a jax array, but got list"):
        interop.tensor([1, 2])
    key = jax.random.key(0)
    assert interop.torch_view(key) is key  # torch has no tensors of keys


def test_environment_conversions(env) -> None:
    x = torch.randn(3).to(torch.bfloat16)
    arrays = env.t2j_copy({"x": x, "n": 1})
    assert arrays["n"] == 1 and arrays["x"].dtype == jnp.bfloat16
    assert torch.equal(env.j2t_copy(arrays)["x"], x) and env.j2t_copy(arrays)["x"].device.type == "cpu"
    tensor = env.j2t_iso(arrays)["x"]
    assert env.t2j_iso([tensor])[0] is arrays["x"]
    assert env.t2j_copy(tensor) is not arrays["x"]
    module, moved = env.to_xla([nn.Linear(2, 2), x])
    assert module.weight.device.type == moved.device.type == "jax"


def test_tensor_methods() -> None:
    x = torch.arange(6.0, device="jax").reshape(2, 3).requires_grad_()
    assert x.torch().device.type == "cpu" and torch.equal(x.torch(), torch.arange(6.0).reshape(2, 3))
    assert x.jax_device.platform == jax.devices()[0].platform
    x.apply_jax(jnp.square).sum().backward()
    close(x.grad, 2 * torch.arange(6.0).reshape(2, 3))
    base = torch.zeros(2, 2, device="jax")
    row = base[0]
    assert row.apply_jax_(lambda a, by: a + by, 3) is row
    assert base.tolist() == [[3, 3], [0, 0]]
    leaf = torch.ones(2, device="jax", requires_grad=True)
    y = leaf * 2
    y.apply_jax_(jnp.exp)
    y.sum().backward()
    wanted = torch.ones(2, requires_grad=True)
    (wanted * 2).exp().sum().backward()
    close(leaf.grad, wanted.grad)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.apply_jax_(jnp.exp)
    with pytest.raises(ShapeError, match=r"of shape \(2, 2\).*returned torch.float32 of shape \(\)"):
        base.apply_jax_(jnp.sum)


# -- calls -----------------------------------------------------------------------------------------


def test_call_jax_has_gradients_of_any_order() -> None:
    x = torch.tensor([0.3, 0.7], device="jax", requires_grad=True)
    cpu = torch.tensor([0.3, 0.7], requires_grad=True)
    (first,) = torch.autograd.grad(interop.call_jax(jnp.sin, x).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(cpu.sin().sum(), cpu, create_graph=True)
    close(first, wanted)
    close(torch.autograd.grad(first.sum(), x)[0], torch.autograd.grad(wanted.sum(), cpu)[0])


def test_call_jax_with_torch_code_gives_gradients_to_its_closure() -> None:
    model, cpu = both()
    x = torch.randn(5, 3)
    hidden, plain = (model[0](x.to("jax")), cpu[0](x))  # no leaf, met in the closure

    def run(body_model, hidden, scan):
        def body(carry, row):
            return carry + body_model(row) * hidden.sum(), carry

        return scan(body, torch.zeros(2, device=hidden.device), x.to(hidden.device))

    total, seen = run(model, hidden, lambda *args: interop.call_jax(jax.lax.scan, *args))

    def python_scan(body, carry, rows):
        outs = []
        for row in rows:
            carry, out = body(carry, row)
            outs.append(out)
        return carry, torch.stack(outs)

    wanted, wanted_seen = run(cpu, plain, python_scan)
    close(total, wanted)
    close(seen, wanted_seen)
    (total.square().sum() + seen.sum()).backward()
    (wanted.square().sum() + wanted_seen.sum()).backward()
    for ours, theirs in zip(model.parameters(), cpu.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)


def by_functional_call(cpu):
    model = copy.deepcopy(cpu).to("jax")
    weights = {k: v.detach().jax() for k, v in model.named_parameters()}
    return weights, lambda w, x: interop.call_torch(torch.func.functional_call, model, w, (x,))


def by_extract_jax(cpu):
    weights, function = interop.extract_jax(cpu)
    return weights, lambda w, x: function(w, (x,))


@pytest.mark.parametrize("extract", [by_functional_call, by_extract_jax])
def test_a_module_in_jax_transformations(extract) -> None:
    cpu = network()
    weights, function = extract(cpu)
    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    plain = torch.from_numpy(np.array(x))

    def loss(weights, x):
        return (function(weights, x) ** 2).sum()

    cpu(plain).square().sum().backward()
    for transform in (lambda f: f, jax.jit):
        gradients = transform(jax.grad(loss))(weights, x)
        for name, parameter in cpu.named_parameters():
            close(gradients[name], parameter.grad)
    rows = jax.jit(jax.vmap(loss, (None, 0)))(weights, x[:, None])
    close(rows, torch.stack([cpu(row[None]).square().sum() for row in plain]))
    hessian = torch.autograd.functional.hessian(lambda x: cpu(x).square().sum(), plain)
    close(jax.hessian(loss, 1)(weights, x), hessian)
    close(jax.jit(jax.jacrev(jax.jacfwd(loss, 1), 1))(weights, x), hessian)
    total, _ = jax.lax.scan(lambda c, row: (c + loss(weights, row[None]), None), jnp.float32(0), x)
    close(total, cpu(plain).square().sum())


def _through_detach(x):
    return (x.detach() * x).sum()


def _through_no_grad(x):
    with torch.no_grad():
        y = x * 3
    return (y * x).sum()


def _through_detach_in_place(x):
    y = x * 2
    return (y.clone().detach_() * y).sum()


def _write_through_detach(x):
    y = x * 2
    y.detach().mul_(5)
    return (y.detach()[0] + y).sum()


def _through_data(x):
    y = x * 2
    y.data.clamp_(max=3)
    return (x.data * x).sum() + (y * y.data).sum()


def _written_under_no_grad(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(5)
        y[0].add_(1)
        z = F.linear(x[None], torch.ones(3, 3, device=x.device))[0]
    return (y * y.detach() + z * x).sum()


CUTS = [_through_detach, _through_no_grad, _through_detach_in_place, _through_data]
CUTS += [_written_under_no_grad, _write_through_detach]


@pytest.mark.parametrize("function", CUTS, ids=lambda f: f.__name__)
def test_what_cuts_gradients_in_torch_cuts_those_of_jax(function) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    function(x).backward()
    given = torch.tensor([1.0, 2.0, 3.0], device="jax", requires_grad=True)
    torchax_core.jit(function)(given).backward()
    close(given.grad, x.grad)
    close(jax.grad(interop.jax_view(function))(jnp.array([1.0, 2.0, 3.0])), x.grad)
    close(jax.jit(jax.grad(interop.jax_view(function)))(jnp.array([1.0, 2.0, 3.0])), x.grad)
    with torch.no_grad():
        close(jax.grad(interop.jax_view(function))(jnp.array([1.0, 2.0, 3.0])), x.grad)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * x, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, (x > 0).long()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient, _):
        x, y = ctx.saved_tensors
        return gradient * y * 2, gradient * x * 3


class SavesResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * y


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def _in_place(x):
    y = x * 2
    InPlace.apply(y)
    return (y * y).sum()


def _setup(x):
    a, b = WithSetup.apply(x, x.sin())
    return (a * b).sum()


def _inner_backward(x):
    y = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(Straight.apply(y, 2).sum(), y)
    return (gradient * x).sum()


def _checkpointed(x, reentrant):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=reentrant).sum()


straight, with_setup = Straight.apply, WithSetup.apply  # taken before anything is traced


def _taken(x):
    return (straight(x * 2, 5) * with_setup(x, x.sin())[0]).sum()


FUNCTIONS = [
    lambda x: (Straight.apply(x * 2, 5) * x).sum(),
    _setup,
    _in_place,
    _inner_backward,
    lambda x: _checkpointed(x, True),
    lambda x: _checkpointed(x, False),
    lambda x: (SavesResult.apply(x) * x).sum(),
    _taken,
]


@pytest.mark.parametrize(
    "function",
    FUNCTIONS,
    ids=["straight", "setup_context", "in_place", "inner", "reentrant", "checkpoint", "saves result", "taken"],
)
def test_autograd_functions_bring_their_backward(function) -> None:
    values = [1.2, 2.6, 3.1]
    x = torch.tensor(values, requires_grad=True)
    function(x).backward()
    before = torch.autograd.Function.__dict__["apply"]
    ours, array = interop.jax_view(function), jnp.array(values)
    close(ours(array), function(x.clone()))
    for gradient in (jax.grad(ours), jax.jit(jax.grad(ours)), lambda a: jax.vmap(jax.grad(ours))(a[None])[0]):
        close(gradient(array), x.grad)
    if function is not FUNCTIONS[4]:  # torch itself has none of a reentrant checkpoint
        second = torch.autograd.functional.hessian(function, torch.tensor(values))
        close(jax.jacrev(jax.jacrev(ours))(array), second)
    for run in (function, torchax_core.jit(function)):
        given = torch.tensor(values, device="jax", requires_grad=True)
        run(given).backward()
        close(given.grad, x.grad)

    weight = torch.tensor(values, device="jax", requires_grad=True)
    torchax_core.jit(lambda: function(weight).backward())()
    close(weight.grad, x.grad)
    assert torch.autograd.Function.__dict__["apply"] is before
    assert "__getattribute__" not in torch.autograd.function.FunctionMeta.__dict__


class Batched(WithSetup):
    generate_vmap_rule = True


batched = Batched.apply


def test_a_custom_backward_under_torch_vmap_is_jaxs_too():
    values = [1.2, 2.6, 3.1]

    def function(x, apply):
        return torch.func.vmap(lambda x: apply(x, x.sin())[0])(x).sum()

    x = torch.tensor(values, requires_grad=True)
    function(x, Batched.apply).backward()
    for apply in (lambda *args: Batched.apply(*args), batched):
        close(jax.grad(interop.jax_view(lambda x, apply=apply: function(x, apply)))(jnp.array(values)), x.grad)


def test_a_custom_backward_under_torch_func_in_a_trace():
    values, weight = torch.tensor([1.2, 2.6, 3.1]), torch.tensor([2.0, 3.0, 5.0])
    programs = {
        "grad": torch.func.grad(lambda x, y: Batched.apply(x, y)[0].sum()),
        "vmap of grad": torch.func.vmap(torch.func.grad(lambda x, y: Batched.apply(x, y)[0])),
        "grad of grad": torch.func.grad(
            lambda x, y: torch.func.grad(lambda x: Batched.apply(x, y)[0].square().sum())(x).sum()
        ),
    }
    for program in programs.values():
        expected = program(values, weight)
        assert expected.abs().min() > 0
        for run in (program, torchax_core.jit(program)):
            close(run(values.to("jax"), weight.to("jax")), expected)
    old = torchax_core.jit(torch.func.grad(lambda x: Straight.apply(x, 2).sum()))
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):  # as outside of a trace
        old(values.to("jax"))


def test_a_detached_tensor_still_shares_memory_inside_jax() -> None:
    wanted = _write_through_detach(torch.tensor([1.0, 2.0]))
    close(jax.jit(interop.jax_view(_write_through_detach))(jnp.array([1.0, 2.0])), wanted)


def test_writes_that_jax_would_lose_are_undone_and_reported() -> None:
    norm = nn.BatchNorm1d(3).to("jax")
    for run in (jax.jit, jax.vmap):
        with pytest.raises(SideEffectError, match="not among its arguments.*torchax_core.jit"):
            run(interop.jax_view(norm))(jnp.ones((2, 4, 3)) if run is jax.vmap else jnp.ones((4, 3)))
        assert norm.running_mean.tolist() == [0, 0, 0] and norm.num_batches_tracked.item() == 0
    weight = torch.ones(2, device="jax", requires_grad=True)

    def backward(x):
        (weight * x).sum().backward()
        return x

    with pytest.raises(SideEffectError, match=r"the gradient of a tensor of shape \(2,\)"):
        jax.jit(interop.jax_view(backward))(jnp.ones(2))
    assert weight.grad is None

    def argument(x):
        x.add_(1)
        return x

    assert jax.jit(interop.jax_view(argument))(jnp.zeros(2)).tolist() == [1, 1]


def test_fixed_random_numbers_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="the same at every run"):
        jax.jit(interop.jax_view(lambda x: F.dropout(x, 0.5)))(jnp.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda x: interop.call_torch(lambda x: F.dropout(x, 0.5).sum(), x))(jnp.ones(3))


def test_an_overridden_key(env) -> None:
    def draw(key):
        with env.override_property(prng=key):
            return torch.rand(4, device="jax")

    wanted = draw(jax.random.PRNGKey(3)).tolist()
    assert draw(jax.random.key(3)).tolist() == wanted != draw(jax.random.key(4)).tolist()
    assert torchax_core.jit(lambda: draw(jax.random.key(3)))().tolist() == wanted
    assert jax.jit(lambda key: draw(key).jax())(jax.random.key(3)).tolist() == wanted
    compiled = torchax_core.jit(lambda: torch.rand(4, device="jax"))
    with env.override_property(prng=jax.random.key(3)):
        assert compiled().tolist() == wanted != compiled().tolist()
        with pytest.raises(RuntimeError, match="save that key"):
            torch.jax.get_rng_state()
    before = env.prng_key
    drawn = env.get_and_rotate_prng_key()
    assert (jax.random.key_data(before) == jax.random.key_data(drawn)).all()
    assert (jax.random.key_data(env.prng_key) != jax.random.key_data(drawn)).any()


# -- transformations of torch code -----------------------------------------------------------------


@pytest.mark.parametrize("transform", [interop.gradient_checkpoint, interop.wrap_jax_jit, interop.jax_jit])
def test_transformed_modules_follow_their_weights(transform) -> None:
    model, cpu = both()
    run = transform(model)
    x = torch.randn(4, 3)
    for _ in range(2):
        for module in (model, cpu):
            module.zero_grad()
        given, plain = x.to("jax").requires_grad_(), x.clone().requires_grad_()
        (run(given) ** 2).sum().backward()
        (cpu(plain) ** 2).sum().backward()
        close(given.grad, plain.grad)
        for ours, theirs in zip(model.parameters(), cpu.parameters()):
            close(ours.grad, theirs.grad)
        with torch.no_grad():
            close(run(x.to("jax")), cpu(x))
            for module in (model, cpu):
                module[0].weight.mul_(2)  # compiled in as a constant, it would now be stale
            close(run(x.to("jax")), cpu(x))


def test_gradient_checkpoint_computes_again() -> None:
    saved = []

    def block(x):
        return x.sin().cos()

    def residuals(f, x):
        _, vjp = jax.vjp(interop.jax_view(f), x)
        saved.append(len([leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == x.shape]))

    residuals(block, jnp.ones(7))
    residuals(interop.gradient_checkpoint(block), jnp.ones(7))
    assert saved == [2, 1]
    policy = jax.checkpoint_policies.everything_saveable
    residuals(interop.gradient_checkpoint(block, {"policy": policy}), jnp.ones(7))
    assert saved[-1] == 2


def test_jax_value_and_grad() -> None:
    model, cpu = both()
    x = torch.randn(4, 3)

    def loss(weights, x):
        out = torch.func.functional_call(model, weights, (x,))
        return (out**2).sum(), out

    value_and_grad = interop.jax_value_and_grad(loss, {"has_aux": True})
    (value, out), gradients = value_and_grad(dict(model.named_parameters()), x.to("jax"))
    (cpu(x) ** 2).sum().backward()
    close(value, (cpu(x) ** 2).sum())
    close(out, cpu(x))
    assert not value.requires_grad and list(gradients) == sorted(gradients)
    for name, parameter in cpu.named_parameters():
        close(gradients[name], parameter.grad)
    (value, _), gradients = interop.jax_jit(value_and_grad)(dict(model.named_parameters()), x.to("jax"))
    close(gradients["0.weight"], cpu[0].weight.grad)


def test_optax_over_torch_parameters() -> None:
    model, cpu = both()
    optimizer = interop.torch_view(optax.sgd(0.1, momentum=0.9))
    params = {k: v.detach() for k, v in model.named_parameters()}
    state = optimizer.init(params)
    reference = torch.optim.SGD(cpu.parameters(), lr=0.1, momentum=0.9)
    step = interop.jax_value_and_grad(lambda p, x: torch.func.functional_call(model, p, (x,)).square().sum())
    for i in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        _, gradients = step(params, x.to("jax"))
        updates, state = optimizer.update(gradients, state, params)
        params = interop.torch_view(optax.apply_updates)(params, updates)
        reference.zero_grad()
        cpu(x).square().sum().backward()
        reference.step()
    for name, parameter in cpu.named_parameters():
        close(params[name], parameter)


def test_fori_loop_and_j2t_autograd() -> None:
    scale = torch.tensor([1.5, 2.0], device="jax", requires_grad=True)
    out = interop.fori_loop(0, 3, lambda i, x: x * scale + i, torch.ones(2, device="jax"))
    plain, cpu_scale = torch.ones(2), torch.tensor([1.5, 2.0], requires_grad=True)
    for i in range(3):
        plain = plain * cpu_scale + i
    out.sum().backward()
    plain.sum().backward()
    close(out, plain)
    close(scale.grad, cpu_scale.grad)
    x = torch.ones(2, device="jax", requires_grad=True)
    interop.j2t_autograd(lambda x, by: x * by)(x, by=3.0).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_a_number_met_in_a_shard_map_without_jit_is_of_use_later() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for f in (interop.jax_view(lambda x: x * 1234), jax.jit(interop.jax_view(lambda x: x * 1234))):
        run = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
        assert run(jnp.arange(3)).tolist() == [0, 1234, 2468]
    assert (torch.arange(3, device="jax") * 1234).tolist() == [0, 1234, 2468]


def test_jax_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("x")
    weight = torch.tensor([2.0], device="jax", requires_grad=True)
    run = interop.jax_shard_map(lambda x: x * weight, {"mesh": mesh, "in_specs": spec, "out_specs": spec})
    x = torch.arange(4.0, device="jax", requires_grad=True)
    run(x).sum().backward()
    assert x.grad.tolist() == [2] * 4 and weight.grad.tolist() == [6]


def test_jax_jit_numbers_and_static_arguments() -> None:
    run = interop.jax_jit(lambda x, n, flag: x * n if flag else x, {"static_argnames": ("flag",)})
    x = torch.ones(2, device="jax")
    assert run(x, 0.5, True).tolist() == [0.5, 0.5] and run(x, 2, flag=False).tolist() == [1, 1]
    assert run(x, 0.25, True).dtype is torch.float32
    assert len(run.jitted.compilations) == 2
    by_number = interop.jax_jit(lambda x, n: x[:n], {"static_argnums": 1})
    assert by_number(x, 1).shape == (1,) and by_number(x, 2).shape == (2,)
    with pytest.raises(TypeError, match="has no hash"):
        by_number(x, [1])
    with pytest.raises(TypeError, match="but got backend"):
        interop.jax_jit(lambda x: x, {"backend": "cpu"})
    assert "stablehlo" in by_number.lower(x, 1).as_text()


def test_jax_jit_gives_up_donated_arguments_and_keeps_writes() -> None:
    counter = torch.zeros((), device="jax")

    def step(params, x):
        counter.add_(1)
        return {k: v + x for k, v in params.items()}

    run = interop.jax_jit(step, {"donate_argnums": (0,)})
    params = {"a": torch.zeros(1000, device="jax")}
    x = torch.ones(1000, device="jax")
    for n in range(1, 4):
        old = params
        params = run(params, x)
        assert old["a"].jax().is_deleted() and not x.jax().is_deleted()
        assert params["a"][0].item() == n == counter.item()


def test_jax_jit_shardings() -> None:
    mesh = jax.make_mesh((1,), ("x",))
    over = jax.sharding.NamedSharding(mesh, jax.P("x"))
    run = interop.jax_jit(
        lambda x, y: {"s": x + y, "t": x}, {"in_shardings": (over, None), "out_shardings": {"s": over, "t": None}}
    )
    out = run(torch.ones(2, device="jax"), torch.ones(2, device="jax"))
    assert out["s"].tolist() == [2, 2] and out["s"].jax().sharding.spec == jax.P("x")
    with pytest.raises(TypeError, match="in_shardings has 2 entries"):
        run(torch.ones(2, device="jax"), y=torch.ones(2, device="jax"))


# -- modules as functions --------------------------------------------------------------------------


class Tied(nn.Module):
    """A module with most things a module may have: ties, an LSTM's flat weights, buffers, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.full((1,), 2.0)

    def forward(self, ids):
        return self.head(self.norm(self.lstm(self.embed(ids))[0])) * self.scale

    def encode(self, ids):
        return self.embed(ids) * self.scale


def tied() -> tuple[Tied, Tied]:
    cpu = Tied()
    model = copy.deepcopy(cpu).to("jax")
    model.scale = model.scale.to("jax")
    return model, cpu


def test_jittable_module() -> None:
    model, cpu = tied()
    run = interop.JittableModule(model)
    assert isinstance(run, Tied) and "head.weight" not in run.params and len(run.params) == 7
    assert set(run.buffers) == {"scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    ids = torch.randint(0, 7, (3, 5))
    out, wanted = run(ids.to("jax")), cpu(ids)
    close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in cpu.named_parameters():
        torch.testing.assert_close(run.params[name].grad.cpu(), parameter.grad, rtol=1e-3, atol=1e-4)
    close(model.norm.running_mean, cpu.norm.running_mean)
    assert model.norm.num_batches_tracked.item() == 1
    close(run.jittable_call("encode", ids.to("jax")), cpu.encode(ids))
    run.make_jitted("encode")
    run.params["embed.weight"] = torch.zeros(7, 4, device="jax")
    assert run.encode(ids.to("jax")).abs().sum().item() == 0 and model.encode(ids.to("jax")).abs().sum().item() > 0


def test_jittable_module_functional_call() -> None:
    model, cpu = tied()
    run = interop.JittableModule(model, dedup_parameters=False)
    assert "head.weight" in run.params
    run = interop.JittableModule(model)
    ids = torch.randint(0, 7, (3, 5))
    zeros = {**run.params, "embed.weight": torch.zeros(7, 4, device="jax")}
    out = run.functional_call("forward", zeros, run.buffers, None, ids.to("jax"))
    assert out.abs().sum().item() == 0  # the head is tied to the embedding
    close(run.functional_call(lambda m, x: m.encode(x), run.params, run.buffers, None, ids.to("jax")), cpu.encode(ids))
    with pytest.raises(KeyError, match="has no tensor.*nonsense"):
        run.functional_call("forward", {"nonsense": out}, {}, None, ids.to("jax"))
    with pytest.raises(TypeError, match="a method's name"):
        run.functional_call(3, {}, {}, None)
    with pytest.raises(RuntimeError, match=r"weight is on device cpu"):
        interop.JittableModule(nn.Linear(2, 2))(torch.ones(1, 2, device="jax"))


def test_jittable_module_random_numbers(env) -> None:
    run = interop.JittableModule(nn.Dropout(0.5), env=env)
    x = torch.ones(64, device="jax")
    assert run(x).tolist() != run(x).tolist()
    with run.with_rng(jax.random.PRNGKey(1)):
        wanted = run(x).tolist()
    functional = interop.jax_jit(lambda rng, x: run.functional_call("forward", {}, {}, rng, x))
    for key in (jax.random.PRNGKey(1), jax.random.key(1)):
        assert functional(key, x).tolist() == wanted
    assert functional(jax.random.key(2), x).tolist() != wanted


def test_a_copied_jittable_module_is_its_own() -> None:
    model, _ = both()
    run = interop.JittableModule(model)
    x = torch.ones(1, 3, device="jax")
    before = run(x).tolist()
    other = copy.deepcopy(run)
    with torch.no_grad():
        for parameter in other.params.values():
            parameter.zero_()
    assert other(x).tolist() == [[0, 0]] and run(x).tolist() == before
    assert other.params["0.weight"] is other._model[0].weight is not model[0].weight


def test_jittable_module_static_arguments() -> None:
    class Repeat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, device="jax"))

        def forward(self, x, times):
            return torch.cat([x * self.scale] * times)

    for options in (
        {"static_argnums": (4,)},
        {"static_argnums": 4, "donate_argnums": (1,)},
        {"static_argnames": "times"},
    ):
        run, x = interop.JittableModule(Repeat(), extra_jit_args=options), torch.ones(2, device="jax")
        assert run(x, 3).shape == (6,) and run(x, 2).shape == (4,)
        run.params["scale"] = torch.full((1,), 2.0, device="jax")
        assert run(x, 2).tolist() == [2] * 4


def test_extract_and_set_all_buffers() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    params, buffers = interop.extract_all_buffers(model)
    assert "norm.weight" in buffers and "head.weight" in params and "scale" in buffers
    interop.set_all_buffers(
        model, {"norm.bias": torch.ones(5)}, {"scale": torch.zeros(1), "norm.running_mean": torch.ones(5)}
    )
    assert model.scale.item() == 0 and model.norm.running_mean[0].item() == 1
    assert isinstance(model.norm.bias, nn.Parameter) and model.norm.bias.requires_grad
    with pytest.raises(KeyError, match="has no parameter 'nope'"):
        interop.set_all_buffers(model, {"nope": torch.ones(1)}, {})


def test_extract_jax() -> None:
    cpu = Tied()
    weights, function = interop.extract_jax(copy.deepcopy(cpu))
    assert "head.weight" not in weights and all(isinstance(w, jax.Array) for w in weights.values())
    ids = torch.randint(0, 7, (3, 5))
    array = jnp.asarray(ids.numpy())
    out, new = jax.jit(lambda w, a: function(w, (a,), return_weights=True))(weights, array)
    wanted = cpu(ids)
    close(out, wanted)
    close(new["norm.running_var"], cpu.norm.running_var)
    assert new["norm.num_batches_tracked"].item() == 1 and weights["norm.num_batches_tracked"].item() == 0
    floats = {k: v for k, v in weights.items() if v.dtype == jnp.float32}
    gradients = jax.grad(lambda w: (function({**weights, **w}, (array,)) ** 2).sum())(floats)
    wanted.square().sum().backward()
    for name, parameter in cpu.named_parameters():
        torch.testing.assert_close(torch.from_numpy(np.array(gradients[name])), parameter.grad, rtol=1e-3, atol=1e-4)


def test_extract_jax_keeps_its_mode_and_takes_a_key() -> None:
    dropout = nn.Dropout(0.5)
    _, training = interop.extract_jax(dropout)
    _, evaluating = interop.extract_jax(dropout.eval())
    run = jax.jit(lambda key: training({}, (jnp.ones(64),), rng=key))
    assert run(jax.random.key(0)).tolist() == run(jax.random.key(0)).tolist() != run(jax.random.key(1)).tolist()
    assert 0 in run(jax.random.key(0)).tolist() and evaluating({}, (jnp.ones(64),)).tolist() == [1] * 64
    assert not dropout.training


def test_forward_mode_of_an_autograd_function_is_refused() -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(interop.jax_view(FUNCTIONS[0]))(jnp.ones(2))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2 * ctx.factor, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent * 3 * ctx.saved_tensors[0] ** 2 * ctx.factor


class Exponential(torch.autograd.Function):
    """Without setup_context's twin: saves its result; has half the derivative, so that nobody else's is taken for it."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0] * 0.5


def test_autograd_functions_bring_their_jvp() -> None:
    x, ones = jnp.array([0.3, 0.7]), jnp.ones(2)
    function = interop.jax_view(lambda x: Cube.apply(x, 2).sin().sum())

    def reference(x):
        return jnp.sin(2 * x**3).sum()

    for derivative in (
        jax.grad,
        jax.jacfwd,
        jax.hessian,
        lambda f: jax.jit(jax.hessian(f)),
        lambda f: jax.jacrev(jax.grad(f)),
    ):
        assert jnp.allclose(derivative(function)(x), derivative(reference)(x), rtol=1e-5)
    assert jnp.allclose(jax.jvp(function, (x,), (ones,))[1], jax.jvp(reference, (x,), (ones,))[1])
    rows = jnp.stack([x, 2 * x])
    assert jnp.allclose(jax.vmap(jax.jacfwd(function))(rows), jax.vmap(jax.grad(reference))(rows), rtol=1e-5)
    half = interop.jax_view(lambda x: Exponential.apply(x))
    value, tangent = jax.jvp(half, (x,), (ones,))
    assert jnp.allclose(value, jnp.exp(x)) and jnp.allclose(tangent, jnp.exp(x) / 2)
    second = jax.jvp(lambda x: jax.jvp(half, (x,), (ones,))[1], (x,), (ones,))[1]
    assert jnp.allclose(second, jnp.exp(x) / 4)
    weight = torch.tensor([0.3, 0.7], device="jax", requires_grad=True)
    torchax_core.jit(lambda: Cube.apply(weight, 2).sin().sum())().backward()
    assert jnp.allclose(weight.grad.jax(), jax.grad(reference)(x), rtol=1e-5)


def test_derivatives_of_derivatives_keep_64_bits() -> None:
    """What was called with 64-bit types on has all its derivatives computed so, whenever they are asked for."""
    x = torch.linspace(0.1, 0.9, 4, dtype=torch.float64).to("jax").requires_grad_()
    with jax.enable_x64(True):
        y = interop.call_jax(lambda a: a**3 * jnp.full((), 1 / 3, jnp.float64), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.dtype is second.dtype is torch.float64
    torch.testing.assert_close(first.detach().cpu(), x.detach().cpu() ** 2, rtol=1e-14, atol=0)
    torch.testing.assert_close(second.cpu(), 2 * x.detach().cpu(), rtol=1e-14, atol=0)
