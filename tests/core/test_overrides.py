"""Overrides in every combination: what is overridden, by what, where it holds, and what the program around it is."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchax_core
from torchax_core import Environment, default_env, override_op_definition
from torchax_core.errors import OpNameError, SignatureError

try:
    import torchvision
except ImportError:  # there is none for the torch installed
    torchvision = None

ENV = default_env()
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
ROIS = torch.tensor([[0.0, 0, 0, 1, 1]])


@torch.library.custom_op("torchax_overrides::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(lambda x: torch.empty_like(x))
cube.register_autograd(lambda ctx, grad: grad * 7, setup_context=lambda ctx, inputs, output: None)
LIBRARY = torch.library.Library("torchax_overrides", "FRAGMENT")
LIBRARY.define("twice_plus(Tensor x, float b) -> Tensor")
LIBRARY.impl("twice_plus", lambda x, b: x * 2 + b, "CompositeImplicitAutograd")


def pooled(x):
    return torchvision.ops.roi_align(x[None, None], ROIS.to(x.device), (2, 2))[0, 0]


def pooling(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    return input * input * 3


# what is overridden: how to call it, its name, the same function in JAX or torch (3 x^2), and its derivative from then on:
# that of the new function, or still what torch has a formula for
TARGETS = {
    "aten op": (torch.exp, "aten::exp", lambda self: self * self * 3, lambda x: x * x * 3),
    "composite op": (F.selu, "aten::selu", lambda self: self * self * 3, lambda x: 6 * x),
    "composite op of a third party": (
        lambda x: torch.ops.torchax_overrides.twice_plus(x, 0.5),
        "torchax_overrides::twice_plus",
        lambda x, b: x * x * (b + 2.5),
        lambda x: 6 * x,
    ),
    "torch function": (F.softsign, F.softsign, lambda input: input * input * 3, lambda x: 6 * x),
    "custom op": (cube, "torchax_overrides::cube", lambda x: x * x * 3, lambda x: torch.full_like(x, 7)),
    "torchvision op": (pooled, "torchvision::roi_align", pooling, torch.ones_like),
}
if torchvision is None:
    del TARGETS["torchvision op"]


@contextlib.contextmanager
def everywhere(op, impl, is_jax_function):
    """Given before the environment exists."""
    with override_op_definition(op, impl, is_jax_function=is_jax_function), Environment():
        yield


@contextlib.contextmanager
def in_environment(op, impl, is_jax_function):
    """For all of an environment's life."""
    environment = Environment()
    environment.override_op_definition(op, impl, is_jax_function=is_jax_function)
    with environment:
        yield


@contextlib.contextmanager
def for_a_block(op, impl, is_jax_function):
    """In the default environment."""
    with ENV.override_op_definition(op, impl, is_jax_function=is_jax_function):
        yield


def in_thread(work):
    """Run `work` in a thread of its own, and what it raises here."""
    failed: list[BaseException] = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def gradient(call, x):
    x = x.detach().requires_grad_()
    call(x).sum().backward()
    return x.grad


def same(ours, expected):
    assert ours.device.type == "jax"
    torch.testing.assert_close(ours.cpu(), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("is_jax_function", [True, False], ids=["jax", "torch"])
@pytest.mark.parametrize("where", [everywhere, in_environment, for_a_block, in_thread], ids=lambda f: f.__name__)
@pytest.mark.parametrize("target", TARGETS)
def test_every_combination(target, where, is_jax_function):
    call, op, impl, derivative = TARGETS[target]
    x = X.to("jax")
    batch = torch.stack([x, x + 1])
    compiled = torchax_core.jit(call)
    before = compiled(x).cpu()
    torch.testing.assert_close(before, call(X))

    def check():
        same(call(x), 3 * X * X)
        same(compiled(x), 3 * X * X)
        same(gradient(call, x), derivative(X))
        same(torchax_core.jit(lambda x: gradient(call, x))(x), derivative(X))
        if target != "torch function":  # torch.func hides the tensors that would have caught it: docs/packs.md
            same(torch.func.vmap(call)(batch), 3 * torch.stack([X, X + 1]) ** 2)
        if "function" not in target and target not in ("custom op", "torchvision op"):  # those two: below
            same(torch.func.grad(lambda x: call(x).sum())(x), derivative(X))
            both = torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(batch)
            same(both, derivative(torch.stack([X, X + 1])))

    if where is in_thread:

        def in_its_own_environment():
            with in_environment(op, impl, is_jax_function):
                check()

        in_thread(in_its_own_environment)
    else:
        with where(op, impl, is_jax_function):
            check()
    same(call(x), before)
    same(compiled(x), before)
    assert not [s for s in ENV.explain(op).chain if s.level == "override"]


def test_torch_func_differentiates_an_op_where_it_does_so_on_the_cpu():
    for call, op, impl, _ in (TARGETS[name] for name in ("custom op", "torchvision op") if name in TARGETS):
        with ENV.override_op_definition(op, impl, is_jax_function=True):
            for x in (X, X.to("jax")):
                with pytest.raises(RuntimeError, match="setup_context"):
                    torch.func.grad(lambda x, call=call: call(x).sum())(x)


# -- composite ops under torch.func ------------------------------------------------------------------------------------


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if dropout_p > 0:
        return NotImplemented
    scores = jnp.einsum("...id,...jd->...ij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(allowed, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ value


def test_every_transform_of_a_composite_override():
    q, k, v = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3))
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return attention(*args, **kwargs)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).square().sum()

    programs = {
        "grad": torch.func.grad(loss, argnums=(0, 1, 2)),
        "grad of grad": torch.func.grad(lambda q, k, v: torch.func.grad(loss)(q, k, v).square().sum(), argnums=1),
        "vmap of grad": torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, 0)),
        "vmap of vmap": torch.func.vmap(torch.func.vmap(loss, in_dims=(0, None, None)), in_dims=(None, 0, 0)),
        "jvp": lambda q, k, v: torch.func.jvp(lambda q: loss(q, k, v), (q,), (v,)),
        "jacrev": lambda q, k, v: torch.func.jacrev(loss, argnums=2)(q, k, v),
    }
    with ENV.override_op_definition("aten::scaled_dot_product_attention", counted, is_jax_function=True):
        for name, program in programs.items():
            calls.clear()
            ours = program(*(x.to("jax") for x in (q, k, v)))
            assert calls, name
            with sdpa_kernel(SDPBackend.MATH):  # the one that torch can differentiate twice
                expected = program(q, k, v)
            for one, other in zip(
                *(r if isinstance(r, tuple) else (r,) for r in (ours, expected)),
                strict=True,
            ):
                torch.testing.assert_close(one.cpu(), other, msg=lambda message, name=name: f"{name}: {message}")


def test_torch_func_on_the_cpu_and_in_other_environments_goes_its_own_way():
    with ENV.override_op_definition("aten::selu", lambda self: self * 0, is_jax_function=True):
        torch.testing.assert_close(torch.func.vmap(F.selu)(X), F.selu(X))
        torch.testing.assert_close(
            torch.func.grad(lambda x: F.selu(x).sum())(X), torch.full_like(X, 1.0507), rtol=1e-4, atol=0
        )
        with Environment():
            same(torch.func.vmap(F.selu)(X.to("jax")), F.selu(X))


def test_an_override_under_torch_func_declines_and_calls_its_op():
    x = X.to("jax")
    with ENV.override_op_definition("aten::selu", lambda self: F.selu(self) + 1):
        same(torch.func.vmap(F.selu)(x), F.selu(X) + 1)
        with ENV.override_op_definition("aten::selu", lambda self: NotImplemented, is_jax_function=True):
            same(torch.func.vmap(F.selu)(x), F.selu(X) + 1)


# -- views -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["aten::diagonal", "aten::movedim.int"], ids=["aten op", "composite op"])
def test_a_view_override_aliases_its_base(op):
    base = torch.zeros(2, 3, device="jax")
    call = {"aten::diagonal": torch.diagonal, "aten::movedim.int": lambda x: torch.movedim(x, 0, 1)}[op]
    read = {
        "aten::diagonal": lambda self, offset=0, dim1=0, dim2=1: self[0, :2],
        "aten::movedim.int": lambda self, source, destination: self.T[::-1],
    }[op]
    for where in (ENV.override_op_definition, override_op_definition):
        with where(op, read, is_view_op=True):
            view = call(base.zero_())
            view.copy_(torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) + 1)
            wanted = [[1, 2, 0], [0, 0, 0]] if op == "aten::diagonal" else [[5, 3, 1], [6, 4, 2]]
            assert base.tolist() == wanted
            assert view.flatten().tolist() == list(range(1, view.numel() + 1))
    assert call(base).tolist() == call(base.cpu()).tolist()


def test_gradients_through_a_view_override_are_torchs_or_refused():
    x = torch.arange(6.0, device="jax").reshape(2, 3).requires_grad_()
    with ENV.override_op_definition(
        "aten::diagonal", lambda self, offset=0, dim1=0, dim2=1: self[0, :2], is_view_op=True
    ):
        torch.diagonal(x).sum().backward()
    assert x.grad.tolist() == [[1, 0, 0], [0, 1, 0]]

    def read(self, source, destination):
        return self.T[::-1]

    with ENV.override_op_definition("aten::movedim.int", read, is_view_op=True):
        with pytest.raises(RuntimeError, match="aten::movedim.* is overridden by a view .* no gradient"):
            torch.movedim(x, 0, 1)
        with torch.no_grad():
            assert torch.movedim(x, 0, 1).tolist() == [[2, 5], [1, 4], [0, 3]]


# -- several at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_undone_in_any_order(target, order):
    call, op, _, _ = TARGETS[target]
    x = X.to("jax")
    compiled = torchax_core.jit(call)

    def giving(value):
        def give(*args, **kwargs):  # JAX functions are called by keyword
            return next(iter((*args, *kwargs.values()))) * 0 + value

        return give

    handles = [ENV.override_op_definition(op, giving(v), is_jax_function=v != 20) for v in (10, 20, 30)]
    left = {0: 10.0, 1: 20.0, 2: 30.0}
    for at in order:
        wanted = torch.full_like(X, left[max(left)])
        same(call(x), wanted)
        same(compiled(x), wanted)
        origins = [source.origin for source in ENV.explain(op).chain if source.level == "override"]
        assert len(origins) == len(left) and all("test_overrides.py" in origin for origin in origins)
        handles[at].undo()
        del left[at]
    same(call(x), call(X))
    same(compiled(x), call(X))


@pytest.mark.parametrize("target", TARGETS)
def test_declining_asks_the_next(target):
    call, op, impl, derivative = TARGETS[target]
    x, asked = X.to("jax"), []

    def declining(number):
        def decline(*args, **kwargs):
            asked.append(number)
            return NotImplemented

        return decline

    with contextlib.ExitStack() as stack:
        for number, is_jax_function in enumerate([True, False, True]):
            stack.enter_context(ENV.override_op_definition(op, declining(number), is_jax_function=is_jax_function))
        same(call(x), call(X))
        assert asked[:3] == [2, 1, 0], "the newest first, each once"
        same(torchax_core.jit(call)(x), call(X))
        same(gradient(call, x), gradient(call, X))
    with ENV.override_op_definition(op, impl, is_jax_function=True):
        with ENV.override_op_definition(op, declining(9), is_jax_function=True):
            same(call(x), 3 * X * X)
            same(gradient(call, x), derivative(X))


@pytest.mark.parametrize("is_jax_function", [True, False], ids=["jax", "torch"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_it_raises_arrives_and_nothing_is_left_behind(target, is_jax_function):
    call, op, _, _ = TARGETS[target]
    x = X.to("jax")

    def failing(*args, **kwargs):
        raise ZeroDivisionError("by the override")

    compiled = torchax_core.jit(call)
    with ENV.override_op_definition(op, failing, is_jax_function=is_jax_function):
        for program in (call, compiled, lambda x: gradient(call, x)):
            with pytest.raises(ZeroDivisionError, match="by the override"):
                program(x)
    same(call(x), call(X))
    same(compiled(x), call(X))
    same(gradient(call, x), gradient(call, X))


def test_torch_code_that_calls_its_op_runs_once_in_every_form():
    x = X.to("jax")
    with ENV.override_op_definition("aten::relu", lambda self: torch.relu(self) * 3):
        for result in (
            torch.relu(x),
            x.clone().relu_(),
            torch.relu_(x.clone()),
            torchax_core.jit(torch.relu_)(x.clone()),
        ):
            same(result, 3 * X)
    with ENV.override_op_definition("aten::neg", lambda self: torch.neg(self) * 3):
        same(torch.neg(x, out=torch.empty_like(x)), -3 * X)
        with ENV.override_op_definition("aten::neg_", lambda self: self.copy_(torch.neg(self) + 1)):
            same(x.clone().neg_(), -3 * X + 1)


def test_explain_shows_the_chain():
    with override_op_definition("aten::selu", lambda self: self, is_jax_function=True):
        with ENV.override_op_definition("aten::selu", lambda self: self + 1):
            chain = ENV.explain("aten::selu").chain
    assert [(s.level, s.definition.kind) for s in chain[:2]] == [
        ("override", "decomposition"),
        ("override", "lowering"),
    ]
    assert chain[-1].level != "override", "what is under them all"
    text = str(ENV.explain("aten::exp_"))
    assert "runs by: pack" in text and "derived from aten::exp" in text


def test_a_jax_function_with_other_parameters_is_refused_at_its_first_call():
    with ENV.override_op_definition("aten::selu", lambda y: y, is_jax_function=True):
        with pytest.raises(SignatureError, match="lacks the argument"):
            F.selu(X.to("jax"))
    same(F.selu(X.to("jax")), F.selu(X))


def test_names_that_torch_does_not_know():
    for op in ("aten::seluu", "selu", "torch.nn.functional.seluu", "nosuchlibrary::op"):
        with warnings.catch_warnings(), pytest.raises(OpNameError):
            warnings.simplefilter("error")
            ENV.override_op_definition(op, lambda self: self, is_jax_function=True)


def test_a_function_that_asks_no_tensor_is_refused():
    for function in (torch.utils.checkpoint.checkpoint, "torch.utils.checkpoint.checkpoint", lambda x: x):
        with pytest.raises(OpNameError, match="an override would not be called. Override an op that it calls"):
            ENV.override_op_definition(function, lambda *args, **kwargs: NotImplemented)


def test_a_function_has_one_chain_under_all_its_names():
    x = torch.ones(1, 2, 2, device="jax")
    by_object, by_name = F.max_pool2d, "torch.nn.functional.max_pool2d"
    for one, other in ((by_object, by_name), (by_name, by_object)):
        with ENV.override_op_definition(one, lambda *args, **kwargs: torch.full((1,), 7.0, device="jax")):
            with ENV.override_op_definition(other, lambda *args, **kwargs: NotImplemented):
                assert F.max_pool2d(x, 2).tolist() == [7.0]
                for name in (one, other):
                    assert [s.level for s in ENV.explain(name).chain].count("override") == 2
            assert F.max_pool2d(x, 2).tolist() == [7.0]
        assert F.max_pool2d(x, 2).tolist() == [[[1.0]]]


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda x: torch.max_pool2d(x, 2), [torch.max_pool2d, "torch.max_pool2d", "aten::max_pool2d"]),
        (lambda x: x.exp(), ["torch.Tensor.exp", "aten::exp", torch.exp, "torch.exp", torch.ops.aten.exp.default]),
        (lambda x: x + 1, [torch.Tensor.__add__, "torch.add", "aten::add.Tensor", "aten::add"]),
        (lambda x: x.split(1), [torch.Tensor.split, "torch.Tensor.split"]),
    ],
)
def test_a_function_that_is_an_op_has_one_chain_under_all_its_names(call, names):
    x = torch.ones(1, 2, 2, device="jax")
    with contextlib.ExitStack() as stack:
        for i, name in enumerate(names):
            result = torch.full((1,), float(i), device="jax")
            stack.enter_context(ENV.override_op_definition(name, lambda *args, result=result, **kwargs: result))
            assert call(x).tolist() == [i], "the newest runs, by whichever name it was given"
            assert torchax_core.jit(call)(x).tolist() == [i]
            for known in names[: i + 1]:
                assert [s.level for s in ENV.explain(known).chain].count("override") == i + 1
    assert ENV.explain(names[0]).chain[:1] == () or ENV.explain(names[0]).source.level != "override"


@pytest.mark.parametrize("op", ["torch.Tensor", "torch.float32", "torch.Tensor.nothing"])
def test_what_is_no_function_is_refused(op):
    with pytest.raises(OpNameError, match="torch has no op"):
        ENV.override_op_definition(op, lambda *args: None)


def test_undone_in_any_order_by_several_threads_in_compiled_functions():
    x, failed, one_by_one = torch.zeros(2, device="jax"), [], threading.Lock()

    def call(x):
        return torch.exp(x) * 1

    def work(environment):
        compiled = torchax_core.jit(call)
        with one_by_one:  # torch.compile is not for several threads at a time
            graph = torch.compile(call, backend="torchax", dynamic=False)
        for order in list(itertools.permutations(range(3)))[:: 1 if environment is ENV else 3]:
            impls = (
                lambda self: torch.exp(self) * 2,
                lambda self: 3 * jnp.exp(self),
                lambda self: torch.exp(self) + 10,
            )
            handles = [
                environment.override_op_definition(op, impl, is_jax_function=at == 1)
                for at, (op, impl) in enumerate(zip(("aten::exp", torch.exp, "torch.exp"), impls, strict=True))
            ]
            left = {0, 1, 2}
            for at in (*order, None):
                wanted = 3.0 if 1 in left else 2.0 if 0 in left else 1.0
                wanted = [wanted + 10 if 2 in left else wanted] * 2
                with one_by_one:
                    found = [graph(x).tolist()]
                found += [call(x).tolist(), compiled(x).tolist(), torch.func.vmap(call)(x).tolist()]
                if found != [wanted] * 4:
                    failed.append((order, left, found, wanted))
                if at is not None:
                    handles[at].undo()
                    left.remove(at)

    def in_another(environment):
        with environment:
            work(environment)

    threads = [threading.Thread(target=in_another, args=(Environment(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    work(ENV)
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("target", TARGETS)
def test_float64_stays_exact(target):
    call, op, impl, derivative = TARGETS[target]
    x = X.double() / 3
    with ENV.override_op_definition(op, lambda *args, **kwargs: impl(*args, **kwargs) / 7, is_jax_function=True):
        if target == "torchvision op":
            call = lambda x: torchvision.ops.roi_align(x[None, None], ROIS.to(x), (2, 2))[0, 0]
        same(call(x.to("jax")), 3 * x * x / 7)
        ours = gradient(call, x.to("jax"))
    assert ours.dtype == torch.float64
    if target in ("torch function", "composite op", "composite op of a third party"):
        torch.testing.assert_close(ours.cpu(), derivative(x) / 7, rtol=1e-12, atol=0)
