"""torchax_ops_jtorch against torch: attention in blocks, cross entropy, einsum, one_hot; how the pack stands among others."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax_core
from torchax_core import Config, Environment
from torchax_core.errors import DataDependentError
from torchax_core.testing import assert_matches_torch, assert_same_error, sample
from torchax_ops_jtorch import attention, blocks

HALF = {"rtol": 2e-2, "atol": 2e-2}


def jitted(function, *tensors):
    """The result and gradients of the sum of squares of `function`, all in one program."""

    @torchax_core.jit
    def step(*tensors):
        result = function(*tensors)
        return result, torch.autograd.grad((result * result).sum(), [t for t in tensors if t.requires_grad])

    return step(*tensors)


def differentiated(function, *tensors):
    result = function(*tensors)
    return result, torch.autograd.grad((result * result).sum(), [t for t in tensors if t.requires_grad])


def assert_same_jitted(function, *tensors):
    """As a program, the function gives what CPU torch gives, gradients included."""
    cpu = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    ours = [t.to("jax").requires_grad_(t.is_floating_point()) for t in tensors]
    expected, gradients = differentiated(function, *cpu)
    result, ours_gradients = jitted(function, *ours)
    torch.testing.assert_close(result.cpu(), expected)
    torch.testing.assert_close([g.cpu() for g in ours_gradients], list(gradients))


# -- attention -----------------------------------------------------------------------------------------------------

QUERIES, KEYS = 43, 21  # blocks of 8 leave 3 over


@pytest.fixture
def in_blocks(monkeypatch):
    monkeypatch.setattr(attention, "block_length", lambda queries, weights: min(queries, 8))


def qkv(dtype=torch.float64, batch=(2, 4), kv_batch=None, queries=QUERIES, keys=KEYS, width=6):
    kv_batch = kv_batch or batch
    shapes = [(*batch, queries, width), (*kv_batch, keys, width), (*kv_batch, keys, 5)]
    return [sample(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


ATTENTION = {
    "plain": ({}, None, {}),
    "shared keys, bool by key": ({"kv_batch": (2, 2)}, (2, 1, 1, KEYS), {"enable_gqa": True}),
    "shared keys, bool by head": ({"kv_batch": (2, 2)}, (4, QUERIES, KEYS), {"enable_gqa": True}),
    "numbers": ({"batch": (3,)}, sample((3, QUERIES, KEYS), torch.float64, seed=4), {"scale": 0.3}),
    "a row without keys": ({}, torch.arange(QUERIES)[:, None] != torch.full((KEYS,), 9), {}),
    "causal, few keys": ({"batch": (3,)}, None, {"is_causal": True}),
    "causal, many keys": ({"batch": (3,), "keys": 71}, None, {"is_causal": True}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_blocks(in_blocks, name):
    shapes, mask, options = ATTENTION[name]
    mask = sample(mask, torch.bool, seed=4) if isinstance(mask, tuple) else mask
    assert_matches_torch(F.scaled_dot_product_attention, *qkv(**shapes), mask, grad=True, **options)


def test_attention_in_blocks_of_half_types(in_blocks):
    values = [t / 3 for t in qkv(torch.bfloat16, batch=(3,), queries=16)]
    assert_matches_torch(F.scaled_dot_product_attention, *values, grad=True, **HALF)


def test_second_derivatives_of_attention_in_blocks(monkeypatch):
    q, k, v = (jnp.asarray(t.numpy()) for t in qkv(torch.float32, batch=(), queries=20, keys=5))

    def second(block):
        monkeypatch.setattr(attention, "block_length", lambda queries, weights: block)
        loss = jax.grad(lambda q: jnp.sin(attention.scaled_dot_product_attention(q, k, v)).sum())
        return jax.jvp(loss, (q,), (jnp.ones_like(q),))[1], jax.grad(lambda q: (loss(q) ** 2).sum())(q)

    for of_blocks, of_one in zip(second(8), second(20), strict=True):
        assert jnp.allclose(of_blocks, of_one, rtol=1e-4, atol=1e-4)


def test_attention_in_blocks_as_a_program(in_blocks):
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same_jitted(attend, *qkv(batch=(1,), queries=18))


def test_dropout_of_attention_in_blocks(in_blocks):
    torch.manual_seed(0)
    q, k = (torch.zeros(1, 256, 4, device="jax") for _ in range(2))
    weights = F.scaled_dot_product_attention(q, k, torch.eye(256, device="jax")[None], dropout_p=0.25).cpu() * 256
    dropped = weights == 0
    assert abs(dropped.float().mean() - 0.25) < 0.01
    torch.testing.assert_close(weights[~dropped], torch.full_like(weights[~dropped], 1 / 0.75))
    assert not torch.equal(dropped[0, :8], dropped[0, 8:16])  # each block has numbers of its own


def test_memory_of_attention_is_linear(monkeypatch):
    def temporary(length):
        shape = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)

        def loss(q, k, v):
            return attention.scaled_dot_product_attention(q, k, v).sum()

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return program.memory_analysis().temp_size_in_bytes

    monkeypatch.setattr(attention, "block_length", lambda queries, weights: 32)
    short, long = temporary(512), temporary(4096)
    assert long < 10 * short
    assert long < 4096 * 4096 * 4 / 8  # the weights alone, of one head, are eight times as much


@pytest.mark.parametrize(("queries", "weights"), [(1, 10**6), (512, 64), (4096, 8 * 4096), (100_000, 100_000), (7, 0)])
def test_blocks_fit(queries, weights):
    block = blocks.block_length(queries, weights)
    assert 1 <= block <= queries
    assert block == queries or block * weights <= 2**19 or block == 32


# -- cross entropy -------------------------------------------------------------------------------------------------

REDUCTIONS = ["none", "mean", "sum"]


@pytest.mark.parametrize(
    ("shape", "smoothing", "reduction"),
    [
        ((6, 5), 0.0, "mean"),
        ((6, 5), 0.1, "none"),
        ((3, 5, 2, 4), 0.0, "none"),
        ((3, 5, 2, 4), 0.1, "mean"),
        ((3, 5, 2, 4), 0.1, "sum"),
    ],
)
def test_cross_entropy(shape, smoothing, reduction):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    x, weight = sample(shape, torch.float64), sample((5,), torch.float64, low=0, high=2, seed=1)
    target = sample((shape[0], *shape[2:]), torch.int64, low=0, high=5, seed=2)
    target.view(-1)[::3] = -7

    def weighted(x, target, **options):
        return F.cross_entropy(x, target, weight.to(x.device), **options)

    assert_matches_torch(F.cross_entropy, x, target, grad=True, ignore_index=-7, **options)
    assert_matches_torch(weighted, x, target, grad=True, ignore_index=-7, **options)
    probabilities = sample(shape, torch.float64, low=0, high=1, seed=3)
    assert_matches_torch(F.cross_entropy, x, probabilities, weight, grad=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_other_dtypes(dtype):
    tolerance = {} if dtype == torch.float32 else HALF
    x, target = sample((6, 50), dtype), sample((6,), torch.int64, low=0, high=50)
    assert_matches_torch(F.cross_entropy, x, target, grad=True, **tolerance)
    assert_matches_torch(F.cross_entropy, x, target.to(torch.uint8), grad=True, **tolerance)


def test_cross_entropy_without_a_batch_or_targets():
    x = sample((5,), torch.float64)
    assert_matches_torch(F.cross_entropy, x, torch.tensor(3), grad=True)
    for reduction in REDUCTIONS:
        ignored, none = torch.full((3,), -100), torch.empty(0, dtype=torch.int64)
        assert_matches_torch(F.cross_entropy, sample((3, 5), torch.float64), ignored, reduction=reduction)
        assert_matches_torch(F.cross_entropy, sample((0, 5), torch.float64), none, reduction=reduction)
        empty = sample((0, 5), torch.float64)
        assert_matches_torch(F.cross_entropy, empty, empty, reduction=reduction)


def test_cross_entropy_of_extreme_numbers():
    infinity = float("inf")
    rows = [[1e4, 1e4 - 2, 1e4 + 1], [-infinity, 0, 1], [-infinity] * 3, [infinity, 0, 1], [3e38, -3e38, 0]]
    for target in range(3):
        targets = torch.full((5,), target)
        assert_matches_torch(F.cross_entropy, torch.tensor(rows), targets, reduction="none")


def test_second_and_forward_derivatives_of_cross_entropy():
    x = sample((3, 4), torch.float64).to("jax").requires_grad_()
    target = torch.tensor([0, 3, -100], device="jax")

    def loss(x):
        return F.cross_entropy(x, target, label_smoothing=0.2)

    assert torch.autograd.gradcheck(loss, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (x,))


def test_cross_entropy_keeps_no_log_probabilities():
    """Besides its inputs the backward is handed two numbers a row."""
    from torchax_ops_jtorch.classes import cross_entropy_loss

    x, target = jnp.zeros((64, 1000), jnp.float32), jnp.zeros(64, jnp.int32)
    with jax.enable_x64(True):
        _, vjp = jax.vjp(lambda x: cross_entropy_loss(x, target.astype(jnp.int64)), x)
    large = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0) >= x.size]
    assert all(leaf.dtype == x.dtype and (leaf == x).all() for leaf in large)


def test_cross_entropy_as_a_program():
    targets = sample((6,), torch.int64, low=0, high=5)
    assert_same_jitted(lambda x, y: F.cross_entropy(x, y), sample((6, 5), torch.float32), targets)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=x.device)),
        lambda x: F.cross_entropy(x, x[:, :2]),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=x.device), x[0, :2]),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=x.device), label_smoothing=2.0),
        lambda x: F.cross_entropy(x, x, ignore_index=1),
        lambda x: F.cross_entropy(
            x, torch.zeros(3, dtype=torch.int64, device=x.device), x[0].detach().clone().requires_grad_()
        ),
    ],
)
def test_errors_of_cross_entropy(call):
    assert_same_error(call, sample((3, 5), torch.float32))


# -- einsum --------------------------------------------------------------------------------------------------------

EQUATIONS = [
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("ij,kj", (2, 3), (4, 3)),
    ("i,j->ji", (2,), (3,)),
    ("ii,i->", (3, 3), (3,)),
    ("i j , j -> i", (2, 3), (3,)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)),
    ("...a,a...->...", (3, 2), (2, 3)),
    ("a...,b...->ab...", (2, 4), (3, 1)),
    ("ij,jk->ik", (2, 1), (3, 4)),  # 1 broadcasts
    ("ij,ij->ij", (2, 1), (2, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    ("ba,bc,bd->acd", (2, 3), (2, 4), (2, 5)),
    ("ab,ab,c->", (2, 3), (2, 3), (4,)),
    ("aab,bc->c", (2, 2, 3), (3, 4)),
    ("ij,jk->ik", (0, 3), (3, 2)),
    ("ij,jk->ik", (2, 0), (0, 2)),
    ("Zz,zA->ZA", (2, 3), (3, 4)),
    (",ij->ij", (), (2, 3)),
]


@pytest.mark.parametrize("case", EQUATIONS, ids=lambda case: case[0])
def test_einsum(case):
    equation, *shapes = case
    operands = [sample(shape, torch.float64, seed=i) for i, shape in enumerate(shapes)]
    assert_matches_torch(lambda *xs: torch.einsum(equation, *xs), *operands, grad=all(0 not in s for s in shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.complex64])
def test_einsum_of_other_dtypes(dtype):
    tolerance = HALF if dtype == torch.bfloat16 else {}
    operands = sample((2, 3, 4), dtype), sample((2, 4, 5), dtype, seed=1)
    grad = dtype.is_floating_point or dtype.is_complex
    assert_matches_torch(lambda *xs: torch.einsum("bij,bjk->bik", *xs), *operands, grad=grad, **tolerance)


def test_einsum_by_lists_and_paths(monkeypatch):
    a, b, c = (sample(shape, torch.float64, seed=i) for i, shape in enumerate([(2, 3), (3, 4), (4, 5)]))
    assert_matches_torch(lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [2, 0]), a, b, grad=True)
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)
    assert_matches_torch(lambda a, b, c: torch.einsum("ij,jk,kl->li", a, b, c), a, b, c, grad=True)


def test_einsum_of_one_tensor_is_a_view():
    x = torch.zeros(3, 3, device="jax")
    torch.einsum("ij->ji", x)[0].fill_(1)
    torch.einsum("ii->i", x).add_(5)
    assert x.tolist() == [[6, 0, 0], [1, 5, 0], [1, 0, 5]]
    assert_matches_torch(lambda x: torch.einsum("iij->j", x), sample((2, 2, 3), torch.float64), grad=True)


@pytest.mark.parametrize("equation", ["ij,jk->iz", "ij,j->i", "ij,jk,kl->il", "ij,jj->i", "i1,jk->k", "ij,jk->ii"])
def test_errors_of_einsum(equation):
    operands = sample((2, 3), torch.float32), sample((3, 4), torch.float32)
    assert_same_error(lambda *xs: torch.einsum(equation, *xs), *operands)


def test_einsum_as_a_program():
    operands = sample((2, 3, 4), torch.float32), sample((2, 4, 5), torch.float32, seed=1)
    assert_same_jitted(lambda *xs: torch.einsum("bij,bjk->kbi", *xs), *operands)


# -- one_hot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_one_hot(shape):
    assert_matches_torch(F.one_hot, sample(shape, torch.int64, low=0, high=5), 6)


def test_one_hot_of_as_many_classes_as_there_are():
    assert_matches_torch(F.one_hot, torch.tensor([1, 4, 2]))
    assert_same_error(F.one_hot, torch.tensor([1.0, 2.0]), 3)
    with pytest.raises(DataDependentError):
        torchax_core.jit(F.one_hot)(torch.tensor([1, 4, 2], device="jax"))


# -- among others --------------------------------------------------------------------------------------------------

CALLS = {
    "aten::scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "aten::cross_entropy_loss": lambda x: F.cross_entropy(x[0], x[1, 0].argmax(-1).expand(4)),
    "aten::einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
}


@pytest.fixture
def x():
    return sample((2, 4, 6), torch.float32)


@pytest.mark.parametrize("op", CALLS)
def test_transforms_and_compilers(op, x):
    call = CALLS[op]
    ours = x.to("jax")
    expected = call(x)
    torch.testing.assert_close(torchax_core.jit(call)(ours).cpu(), expected)
    torch.testing.assert_close(torch.compile(call, backend="torchax")(ours).cpu(), expected)
    batched = torch.func.vmap(call)(torch.stack([ours, ours]))
    torch.testing.assert_close(batched[1].cpu(), expected)
    gradient = torch.func.grad(lambda x: call(x).square().sum())
    torch.testing.assert_close(gradient(ours).cpu(), gradient(x))


@pytest.mark.parametrize("op", CALLS)
def test_autocast(op, x):
    with torch.autocast("jax", dtype=torch.bfloat16):
        result = CALLS[op](x.to("jax"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = CALLS[op](x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.cpu(), expected, **HALF)


@pytest.mark.parametrize("op", CALLS)
def test_the_pack_runs_and_gives_way(op, x):
    """The pack goes before torchax-ops-aten; its user goes before the pack; and it can be left out, or behind."""
    environment = torchax_core.default_env()
    assert "torchax_ops_jtorch" in str(environment.explain(op).chain[0])
    expected = CALLS[op](x)
    for order in ((), ("aten",)):
        with Environment(Config(pack_order=order, blocked_packs=() if order else ("jtorch",))) as other:
            assert order == () or "scaled_dot" not in op or "torchax_ops_aten" in str(other.explain(op).chain[0])
            torch.testing.assert_close(CALLS[op](x.to("jax")).cpu(), expected)
    with environment.override_op_definition(op, lambda *args, **kwargs: torch.full((), 7.0)):
        assert CALLS[op](x.to("jax")).item() == 7
    with environment.override_op_definition(op, lambda *args, **kwargs: NotImplemented, is_jax_function=True):
        torch.testing.assert_close(CALLS[op](x.to("jax")).cpu(), expected)
