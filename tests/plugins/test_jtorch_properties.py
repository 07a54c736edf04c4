"""Arguments of the jtorch pack's functions in combinations that nobody thought of, against CPU torch: values, gradients, errors.

`HYPOTHESIS_EXAMPLES=1000 pytest tests/plugins/test_jtorch_properties.py` looks at more of them.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torchax_core.testing import assert_matches_torch, sample
from torchax_ops_jtorch import attention

# the first ones are the same in each run; of attention and resizing, which compile most, half as many
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "12"))
few = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)


def equal(function, *args, grad=True, **kwargs):
    """Equal on device "jax" and on the CPU; where CPU torch refuses the call, so does the device."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        ours = [a.to("jax") if isinstance(a, torch.Tensor) else a for a in args]
        named = {k: v.to("jax") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as raised:
            function(*ours, **named)
        assert raised.value.args, error
        return
    assert_matches_torch(function, *args, grad=grad, **kwargs)


@st.composite
def attentions(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0]))
    queries, keys = draw(st.sampled_from([1, 2, 5, 9, 17])), draw(st.sampled_from([1, 3, 8, 11]))
    width, value_width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 1)]))
    q = sample((*batch, heads, queries, width), torch.float64, seed=draw(st.integers(0, 9)))
    k = sample((*batch, kv_heads, keys, width), torch.float64, seed=10)
    v = sample((*batch, kv_heads, keys, value_width), torch.float64, seed=11)
    kind = draw(st.sampled_from(["none", "causal", "bool", "float", "by key", "by head", "empty row"]))
    options = {"scale": draw(st.sampled_from([None, 0.5, 1.0, 3.0])), "enable_gqa": kv_heads != heads}
    mask = None
    if kind == "bool":
        mask = sample((queries, keys), torch.bool, seed=12)
    elif kind == "float":
        mask = sample((queries, keys), torch.float64, seed=12)
    elif kind == "by key":
        mask = sample((1, 1, keys), torch.bool, seed=12)
    elif kind == "by head":
        mask = sample((heads, queries, keys), torch.float64, seed=12)
    elif kind == "empty row":
        mask = torch.ones(queries, keys, dtype=torch.bool)
        mask[draw(st.integers(0, queries - 1))] = False
    return (q, k, v, mask, 0.0, kind == "causal"), options, draw(st.sampled_from([4, 10**6]))


@settings(few, max_examples=EXAMPLES // 2)
@given(attentions())
def test_attention(case):
    args, options, block = case
    before, attention.block_length = attention.block_length, lambda queries, weights: min(queries, block)
    try:
        equal(F.scaled_dot_product_attention, *args, **options)
    finally:
        attention.block_length = before


@st.composite
def resizings(draw):
    spatial = draw(st.integers(1, 3))
    mode = draw(
        st.sampled_from(
            ["nearest", "nearest-exact", "area", {1: "linear", 2: "bilinear", 3: "trilinear"}[spatial], "bicubic"]
        )
    )
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), *[draw(st.integers(2, 7)) for _ in range(spatial)])
    options = {"mode": mode}
    if draw(st.booleans()):
        options["size"] = [draw(st.integers(1, 9)) for _ in range(spatial)]
    else:
        options["scale_factor"] = [draw(st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0])) for _ in range(spatial)]
        options["recompute_scale_factor"] = draw(st.sampled_from([None, True]))
    if "linear" in mode or mode == "bicubic":
        options["align_corners"] = draw(st.sampled_from([None, True, False]))
        options["antialias"] = spatial == 2 and draw(st.booleans())
    return sample(shape, torch.float64, seed=1), options


@settings(few, max_examples=EXAMPLES // 2)
@given(resizings())
def test_interpolate(case):
    x, options = case
    equal(F.interpolate, x, **options)


@st.composite
def paddings(draw):
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 5)) for _ in range(dims + draw(st.integers(0, 2)))]
    amounts = [draw(st.integers(-2 if mode == "constant" else 0, 4)) for _ in range(2 * dims)]
    value = draw(st.sampled_from([None, 0.0, 2.5])) if mode == "constant" else None
    return sample(tuple(shape), torch.float64, seed=1), amounts, mode, value


@few
@given(paddings())
def test_pad(case):
    equal(F.pad, *case)


@few
@given(st.lists(st.integers(-1, 4), max_size=6), st.sampled_from([-1, 1, 3, 5, 7]))
def test_one_hot(classes, count):
    equal(F.one_hot, torch.tensor(classes, dtype=torch.int64), count, grad=False)


@st.composite
def equations(draw):
    sizes = {name: draw(st.integers(1, 3)) for name in "abcd"}
    names = [draw(st.lists(st.sampled_from("abcd"), min_size=0, max_size=4)) for _ in range(draw(st.integers(1, 3)))]
    used = sorted({name for each in names for name in each})
    equation = ",".join(map("".join, names))
    if draw(st.booleans()):
        equation += "->" + "".join(draw(st.permutations(used))[: draw(st.integers(0, len(used)))])
    return equation, [sample(tuple(sizes[n] for n in each), torch.float64, seed=i) for i, each in enumerate(names)]


@few
@given(equations())
def test_einsum(case):
    equation, operands = case
    equal(torch.einsum, equation, *operands)
