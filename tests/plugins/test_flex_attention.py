"""torch's flex_attention on device "jax", which torchax_ops_jtorch serves: against CPU torch, and a formula for gradients."""

import math

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import torchax_core
from torchax_core import Config, Environment
from torchax_core.interop import jax_view
from torchax_core.testing import sample
from torchax_ops_jtorch import flex, tiles

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse")

QUERIES, KEYS, WIDTH = 19, 12, 4  # blocks of 8 leave 3 over


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch):
    monkeypatch.setattr(flex, "block_length", lambda queries, weights: min(queries, 8))


def qkv(kv_heads=4, dtype=torch.float32):
    shapes = [(2, 4, QUERIES, WIDTH), (2, kv_heads, KEYS, WIDTH), (2, kv_heads, KEYS, WIDTH)]
    return [sample(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


def on_jax(*tensors):
    return [t.to("jax").requires_grad_(t.requires_grad) for t in tensors]


def relative(score, b, h, q, k):
    return score + (q - k) * (h + 1) * 0.1


def near(b, h, q, k):
    return (q - k).abs() < 5


def biased(bias):
    return lambda score, b, h, q, k: torch.tanh(score) * bias[h, k] + bias[h, q % KEYS]


def mask_on(device):
    return create_block_mask(near, None, None, QUERIES, KEYS, device=device)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_scores_masks_and_statistics(kv_heads):
    values, options = qkv(kv_heads), {"score_mod": relative, "enable_gqa": kv_heads != 4, "return_lse": True}
    expected = flex_attention(*values, block_mask=mask_on("cpu"), **options)
    found = flex_attention(*on_jax(*values), block_mask=mask_on("jax"), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs)


def test_queries_that_may_look_at_nothing():
    mask = create_block_mask(lambda b, h, q, k: q < 0, None, None, QUERIES, KEYS, device="jax")
    q, k, v = (t.requires_grad_() for t in on_jax(*qkv()))
    result = flex_attention(q, k, v, block_mask=mask)
    assert not result.any()
    assert all(not g.any() for g in torch.autograd.grad(result.sum(), [q, k, v]))


def formula(q, k, v, bias):
    place = torch.arange(QUERIES) % KEYS
    score = torch.tanh(q @ k.mT / math.sqrt(WIDTH)) * bias[:, None, :] + bias[:, place][:, :, None]
    return torch.softmax(score, -1) @ v


def by_flex(q, k, v, bias):
    return flex_attention(q, k, v, score_mod=biased(bias))


def gradients(function, values):
    leaves = [v.detach().requires_grad_() for v in values]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


def test_gradients_reach_what_the_score_is_made_of():
    """Eager, and with forward and backward in one program, and compiled by torch; float64 is rounded to float32 in none."""
    values = [*qkv(dtype=torch.float64), sample((4, KEYS), torch.float64, seed=5)]
    expected = gradients(formula, values)
    ours = on_jax(*values)
    jitted = torchax_core.jit(lambda *leaves: torch.autograd.grad(by_flex(*leaves).square().sum(), leaves))
    ways = {
        "eager": gradients(by_flex, ours),
        "jit": jitted(*[v.clone().requires_grad_() for v in ours]),
        "compile": gradients(torch.compile(by_flex, backend="torchax"), ours),
    }
    for way, found in ways.items():
        for ours_gradient, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(
                ours_gradient.cpu(), theirs, rtol=1e-12, atol=1e-12, msg=lambda m, way=way: f"{way}: {m}"
            )


def test_compiled_without_gradients():
    values = [*qkv(), sample((4, KEYS), torch.float32, seed=5)]
    for compiled in (torchax_core.jit(by_flex), torch.compile(by_flex, backend="torchax")):
        torch.testing.assert_close(compiled(*on_jax(*values)).cpu(), formula(*values))


def test_half_types_and_autocast():
    values = qkv()
    expected = flex_attention(*values)
    for ours in (flex_attention(*on_jax(*[v.bfloat16() for v in values])), autocast(values)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.cpu().float(), expected, rtol=2e-2, atol=2e-2)


def autocast(values):
    with torch.autocast("jax", dtype=torch.bfloat16):
        return flex_attention(*on_jax(*values))


def test_errors_are_torchs():
    q, k, v = on_jax(*qkv(kv_heads=2))
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    with Environment(Config(blocked_packs=("jtorch",))), pytest.raises(ValueError, match="only supported on"):
        flex_attention(q, k, v, enable_gqa=True)


# -- the tiles of a BlockMask, 64 long, of which those are computed that are not empty ---------------------------------

TILE, LONG = 64, 256


@pytest.fixture
def tiled(monkeypatch):
    """Go over tiles, small as these are; which tells what was traced."""
    traced = []

    def noted(name):
        function = getattr(tiles, name)

        def run(*args):
            traced.append(name)
            return function(*args)

        monkeypatch.setattr(tiles, name, run)

    monkeypatch.setattr(flex, "block_length", lambda queries, weights: queries)
    monkeypatch.setattr(tiles, "_FEWEST", 1)
    monkeypatch.setattr(tiles, "_FEWEST_ALTOGETHER", 1)
    noted("attend")
    noted("gradients")
    return traced


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    """Of each head its own; the first queries, and so the first block of them, see nothing."""
    return ((q - k).abs() < 20 * (h + 1)) & (q >= 70)


def long_qkv(length=LONG, source=LONG, kv_heads=4, dtype=torch.float64):
    shapes = [(2, 4, length, WIDTH), (2, kv_heads, source, WIDTH), (2, kv_heads, source, 3)]
    return [sample(shape, dtype, seed=i) for i, shape in enumerate(shapes)]


def tiles_on_jax(mask_mod, length=LONG, source=LONG, batch=None, heads=None):
    """The BlockMask of a mask_mod, made on the CPU, which is quicker."""
    return create_block_mask(mask_mod, batch, heads, length, source, device="cpu", BLOCK_SIZE=TILE).to("jax")


def by_places(q, k, v, bias, mask_mod):
    """Result, logarithm of the sum and highest score, from all scores."""
    length, source = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
    score = torch.tanh(q @ k.mT / math.sqrt(WIDTH)) * bias[:, None, :source] + bias[:, :length, None]
    places = torch.meshgrid(*[torch.arange(n) for n in (2, 4, length, source)], indexing="ij")
    score = score.masked_fill(~mask_mod(*places), -torch.inf)
    return torch._safe_softmax(score, -1) @ v, score.logsumexp(-1), score.amax(-1)


def with_bias(q, k, v, bias, mask):
    def score_mod(score, b, h, q, k):
        return torch.tanh(score) * bias[h, k] + bias[h, q]

    aux = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_aux=aux)
    return out, aux.lse, aux.max_scores


def weighed(out, total, weights):
    """A number that depends on all results; what has no sum has no part in it."""
    return (out * weights[0]).sum() + (torch.where(total > -torch.inf, total, 0) * weights[1]).sum()


documents = torch.tensor([[60, 130, 66], [10, 200, 46]])


def document_of(lengths):
    return torch.stack([torch.repeat_interleave(torch.arange(3), row) for row in lengths])


def same_document(of):
    return lambda b, h, q, k: of[b, q] == of[b, k]


@pytest.mark.parametrize(
    ("mask_mod", "options"),
    [
        pytest.param(window, {"heads": 4, "length": 250, "source": 200, "kv_heads": 2}, id="windows"),
        pytest.param(None, {"batch": 2, "kv_heads": 1}, id="documents"),
    ],
)
def test_tiles_give_what_all_scores_give(tiled, mask_mod, options):
    """Results, statistics and gradients, in float64, forward and backward in one program."""
    options = dict(options)
    kv_heads = options.pop("kv_heads")
    sizes = {name: options.get(name, LONG) for name in ("length", "source")}
    of = document_of(documents)
    mask_mod = mask_mod or same_document(of)
    mask = tiles_on_jax(mask_mod, **options)
    if "batch" in options:
        mask.mask_mod = same_document(of.to("jax"))
    values = [*long_qkv(**sizes, kv_heads=kv_heads), sample((4, LONG), torch.float64, seed=5)]
    weights = [sample((2, 4, sizes["length"], *n), torch.float64, seed=6) for n in ((3,), ())]

    def all_of(function, mask, weights, leaves):
        results = function(*leaves, mask)
        return [*results, *torch.autograd.grad(weighed(*results[:2], weights), leaves)]

    expected = all_of(by_places, mask_mod, weights, [v.requires_grad_() for v in values])
    ours = [w.to("jax") for w in weights]
    found = torchax_core.jit(lambda *leaves: all_of(with_bias, mask, ours, leaves))(*on_jax(*values))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-9, atol=1e-9)
    assert set(tiled) == {"attend", "gradients"}


def test_tiles_eager_and_compiled(tiled):
    """Gradients, of a slope for each head too."""
    values = [*long_qkv(dtype=torch.float32), sample((4,), torch.float32, seed=5)]
    mask = create_block_mask(causal, None, None, LONG, LONG, "cpu", TILE, separate_full_blocks=False).to("jax")
    hidden = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)

    def by_tiles(q, k, v, slopes):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * slopes[h], block_mask=mask)

    def by_formula(q, k, v, slopes):
        score = q @ k.mT / math.sqrt(WIDTH) * slopes[:, None, None]
        return torch.softmax(score.masked_fill(hidden, -torch.inf), -1) @ v

    expected = gradients(by_formula, values)
    for way in (by_tiles, torch.compile(by_tiles, backend="torchax")):
        for mine, theirs in zip(gradients(way, on_jax(*values)), expected, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)
        assert set(tiled) == {"attend", "gradients"}
        tiled.clear()


def test_empty_tiles_are_not_touched(tiled):
    """Keys and values of a tile that nothing looks at may be anything; those of the tile that all look at may not."""
    mask = tiles_on_jax(lambda b, h, q, k: k < TILE)
    q, k, v = on_jax(*long_qkv(dtype=torch.float32))
    k[:, :, TILE:], v[:, :, TILE:] = torch.nan, torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    result = torchax_core.jit(
        lambda *leaves: torch.autograd.grad(flex_attention(*leaves, block_mask=mask).sum(), leaves)
    )
    for_query, for_key, for_value = result(*leaves)
    assert for_query.isfinite().all()
    assert for_key.isfinite().all()
    assert for_value[:, :, :TILE].all()
    assert not for_value[:, :, TILE:].any()


@pytest.mark.parametrize("paid", [True, False])
def test_a_block_mask_is_what_it_lists(paid, monkeypatch):
    """Tiles that are listed as full are not asked of mask_mod, and those that are not listed do not count: either way."""
    if paid:
        monkeypatch.setattr(tiles, "_pays", lambda grid: True)
    partly = torch.tensor([[[1, 0, 2, 0]]]), torch.tensor([[[[1, 0, 0, 0], [2, 1, 0, 3], [3, 0, 1, 1], [1, 2, 3, 0]]]])
    full = torch.tensor([[[1, 0, 1, 1]]]), torch.tensor([[[[3, 0, 0, 0], [2, 1, 0, 3], [1, 0, 3, 3], [2, 2, 3, 0]]]])
    lists = [t.int().to("jax") for t in (*partly, *full)]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=lambda b, h, q, k: k % 2 == 0)
    q, k, v = long_qkv(dtype=torch.float32)
    allowed = torch.zeros(4, TILE, 4, TILE, dtype=torch.bool)
    allowed[[0, 2, 2], :, [1, 3, 0], ::2] = True
    allowed[[0, 2, 3], :, [3, 1, 2], :] = True
    score = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~allowed.view(LONG, LONG), -torch.inf)
    found = torchax_core.jit(lambda *values: flex_attention(*values, block_mask=mask))(*on_jax(q, k, v))
    torch.testing.assert_close(found.cpu(), torch._safe_softmax(score, -1) @ v)


def test_derivatives_of_every_order_and_mode_go_through_tiles(tiled):
    """Forward mode and gradients of gradients, under jax.vmap, against attention that is no flex_attention."""
    mask = create_block_mask(causal, None, None, 96, 96, "cpu", TILE, separate_full_blocks=False).to("jax")
    tested = jax_view(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))
    plain = jax_view(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def derivatives(function):
        def loss(x):
            return (function(x, 2 * x, x * x) ** 2).sum()

        def all_of(x):
            return jax.jvp(loss, (x,), (1 + x,)), jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)

        return jax.tree.leaves(jax.jit(jax.vmap(all_of))(x))

    with jax.enable_x64(True):
        x = jnp.asarray(sample((2, 1, 2, 96, WIDTH), torch.float64, seed=1).numpy())
        for mine, theirs in zip(derivatives(tested), derivatives(plain), strict=True):
            assert jnp.allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert set(tiled) == {"attend", "gradients"}


def test_shard_map_that_checks_types_has_all_scores(tiled):
    mask = tiles_on_jax(causal)
    function = jax_view(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    arrays = [v.jax() for v in on_jax(*long_qkv(dtype=torch.float32))]
    parts = jax.shard_map(function, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    found = jax.jit(jax.grad(lambda *xs: (parts(*xs) ** 2).sum()))(*arrays)
    assert not tiled
    assert jnp.allclose(found, jax.jit(jax.grad(lambda *xs: (function(*xs) ** 2).sum()))(*arrays), rtol=1e-4, atol=1e-4)
    assert set(tiled) == {"attend", "gradients"}


def test_tiles_of_half_types(tiled):
    values = long_qkv(dtype=torch.bfloat16)
    mask = tiles_on_jax(causal)
    run = torchax_core.jit(lambda *leaves: gradients(lambda *xs: flex_attention(*xs, block_mask=mask).float(), leaves))
    expected = gradients(lambda *xs: F.scaled_dot_product_attention(*xs, is_causal=True), [v.float() for v in values])
    for mine, theirs in zip(run(*on_jax(*values)), expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.cpu().float() - theirs).norm() < 0.01 * theirs.norm()
    assert set(tiled) == {"attend", "gradients"}


def test_gradients_of_large_captured_tensors_are_not_summed_by_tiles(tiled):
    """Each tile would add to the whole of them."""
    mask = tiles_on_jax(causal)
    bias = sample((2, 4, LONG, LONG), torch.float32, seed=3)
    values = [*long_qkv(dtype=torch.float32), bias]

    def by_tiles(q, k, v, bias):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[b, h, i, j], block_mask=mask)

    def by_formula(q, k, v, bias):
        hidden = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
        return torch.softmax((q @ k.mT / math.sqrt(WIDTH) + bias).masked_fill(hidden, -torch.inf), -1) @ v

    found = torchax_core.jit(lambda *leaves: gradients(by_tiles, leaves))(*on_jax(*values))
    for mine, theirs in zip(found, gradients(by_formula, values), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)
    assert set(tiled) == {"attend"}


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


@pytest.mark.parametrize(
    ("query", "key", "counts", "tile", "goes"),
    [
        ((1, 4, 2048, 64), (1, 2, 2048, 64), (1, 1, 16), 128, True),
        ((8, 4, 1000, 64), (8, 4, 1000, 64), (8, 4, 8), 128, True),
        ((8, 4, 1000, 64), (1, 4, 1000, 64), (8, 1, 8), 128, True),
        (
            (8, 4, 1000, 64),
            (1, 4, 1000, 64),
            (1, 1, 8),
            128,
            False,
        ),  # keys for all batches, which a mask does not tell apart
        ((1, 4, 128, 64), (1, 4, 128, 64), (1, 1, 1), 128, False),  # one tile
        ((1, 4, 2048, 64), (1, 4, 2048, 64), (1, 1, 128), 16, False),  # small ones
        ((1, 4, 0, 64), (1, 4, 2048, 64), (1, 1, 1), 128, False),
        ((1, 4, 2048, 64), (1, 4, 2048, 64), (1, 1, 17), 128, False),  # another length's
        ((4, 4, 2048, 64), (4, 4, 2048, 64), (2, 1, 16), 128, False),
    ],
)
def test_shapes_decide_whether_to_go_over_tiles(query, key, counts, tile, goes):
    arrays = shapes(query, key, counts, (*counts, counts[-1]))
    assert (tiles.grid_of(*arrays[:2], (tile, tile), *arrays[2:]) is not None) == (
        goes and jax.default_backend() == "cpu"
    )
