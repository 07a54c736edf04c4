"""optim.py against CPU torch: lists of mixed shapes and dtypes, fused steps, loss scaling, and whole optimizers."""

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

SHAPES = [(), (0,), (2, 3), (4,)]
UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round "
    "rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
BINARY = "add sub mul div clamp_max clamp_min maximum minimum".split()


def foreach(name):
    return getattr(torch, f"_foreach_{name}")


def tensors(dtype, seed=0, shapes=SHAPES, **range_):
    return [sample(shape, dtype, seed=seed + i, **range_) for i, shape in enumerate(shapes)]


def mixed(*dtypes, seed=0):
    return [sample((2, 3), dtype, low=1, high=5, seed=seed + i) for i, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    """One call over shapes and dtypes at once: each element of the list is promoted by itself."""
    xs = tensors(torch.float32, low=0.1, high=0.9) + tensors(torch.bfloat16, seed=9, shapes=[(3,)], low=0.1, high=0.9)
    if name not in ("frac", "reciprocal"):
        xs.append(sample((3,), torch.int64, low=1, high=5))
    assert_matches_torch(foreach(name), xs)


@pytest.mark.parametrize("name", ["exp", "sqrt", "neg", "abs"])
def test_unary_gradients_and_in_place(name):
    assert_matches_torch(foreach(name), tensors(torch.float64, low=0.1, high=0.9), grad=True)

    def in_place(xs):
        foreach(f"{name}_")(xs)
        return xs

    assert_matches_torch(in_place, tensors(torch.float32, low=0.1, high=0.9))


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    f = foreach(name)
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        xs, ys = tensors(dtype, low=1, high=9), tensors(dtype, seed=9, low=1, high=9)
        assert_matches_torch(f, xs, ys)
        assert_matches_torch(f, xs, 2)
        assert_matches_torch(f, xs, [1.5, 2, 3, 4])


@pytest.mark.parametrize("name", BINARY)
def test_binary_promotes_each_pair_alone(name):
    xs = mixed(torch.int32, torch.float16, torch.float32, torch.int64)
    assert_matches_torch(foreach(name), xs, mixed(torch.float32, torch.bfloat16, torch.float64, torch.int8, seed=9))
    assert_matches_torch(foreach(name), xs, 2)
    assert_matches_torch(foreach(name), xs, [2, 2.5, 3, 4.5])


def test_zero_dim_elements_do_not_widen():
    xs = [sample((3,), torch.float32), sample((3,), torch.bfloat16)]
    assert_matches_torch(torch._foreach_mul, xs, [torch.tensor(2.0, dtype=torch.float64), torch.tensor(3)])
    assert_matches_torch(torch._foreach_mul, xs, torch.tensor(2.0, dtype=torch.float64))
    assert_matches_torch(torch._foreach_add, xs, torch.tensor(2.0, dtype=torch.float64), alpha=0.5)
    assert_matches_torch(torch._foreach_div, xs, torch.tensor(3))


@pytest.mark.parametrize("name", ["add", "sub"])
def test_alpha(name):
    assert_matches_torch(foreach(name), tensors(torch.float32), tensors(torch.float32, seed=9), alpha=0.5, grad=True)
    large = [torch.tensor([1, 2**40 + 1])]
    assert_matches_torch(foreach(name), large, large, alpha=3)


def test_scalars_are_not_compiled_in():
    """A list of new numbers gives new values (and is no constant of the first call)."""
    xs = [sample((2,), torch.float32).to("jax") for _ in range(2)]
    first, second = (torch._foreach_mul(xs, [s, 2 * s]) for s in (1.5, 2.5))
    for x, a, b, k in zip(xs, first, second, (1, 2), strict=True):
        torch.testing.assert_close(a.cpu(), x.cpu() * 1.5 * k)
        torch.testing.assert_close(b.cpu(), x.cpu() * 2.5 * k)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_in_place(name):
    def in_place(xs, other):
        foreach(f"{name}_")(xs, other)
        return xs

    xs = tensors(torch.float32)
    assert_matches_torch(in_place, xs, 2.5)
    assert_matches_torch(in_place, xs, [1.5, 2.0, 3.0, 4.0])
    assert_matches_torch(in_place, xs, tensors(torch.bfloat16, seed=9, low=1, high=2))


def test_in_place_refuses_what_cannot_be_cast():
    assert_same_error(lambda xs: torch._foreach_add_(xs, 0.5), [torch.tensor([1, 2])])


def test_in_place_writes_through_views():
    base = sample((4, 3), torch.float32)

    def write(base):
        torch._foreach_mul_([base[0], base.t()[1, 1:]], 3.0)
        return base

    assert_matches_torch(write, base)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_pointwise(name):
    f = foreach(name)
    xs, a, b = (tensors(torch.float32, seed=s, low=1, high=3) for s in (0, 9, 18))
    assert_matches_torch(f, xs, a, b)
    assert_matches_torch(f, xs, a, b, 0.5)
    assert_matches_torch(f, xs, a, b, [0.5, 1, 1.5, 2])
    assert_matches_torch(
        f, xs[2:], a[2:], b[2:], 0.5, grad=True
    )  # CPU torch fails to differentiate addcdiv of () and (0,)
    half = mixed(torch.float16, torch.bfloat16)
    assert_matches_torch(f, half, mixed(torch.float32, torch.bfloat16, seed=4), half, value=0.5)


def test_pointwise_value_is_cast_not_promoted():
    xs = [torch.tensor([1, 2])]
    assert_matches_torch(torch._foreach_addcmul, xs, xs, xs, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lerp(dtype):
    xs, ys = tensors(dtype), tensors(dtype, seed=9)
    for weight in (0.1, 0.9, [0.1, 0.5, 0.9, 1.0], tensors(dtype, seed=18, low=0, high=1)):
        assert_matches_torch(
            torch._foreach_lerp, xs, ys, weight, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2
        )


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -1.5])
def test_pow_of_floats(exponent):
    xs = tensors(torch.float32, low=0.1, high=2)
    assert_matches_torch(torch._foreach_pow, xs, exponent)
    assert_matches_torch(torch._foreach_pow, xs, [exponent, 1, 2.5, exponent])
    assert_matches_torch(torch._foreach_pow, exponent, xs)
    assert_matches_torch(torch._foreach_pow, xs, tensors(torch.float32, seed=9))


def test_pow_of_integers():
    xs = [torch.tensor([2, 1, -1, -1, 0, -3])]
    assert_matches_torch(torch._foreach_pow, xs, [torch.tensor([-2, -1, -1, -2, 3, 3])])
    assert_matches_torch(torch._foreach_pow, xs, 3)
    assert_matches_torch(torch._foreach_pow, xs, 0.5)
    assert_matches_torch(torch._foreach_pow, [torch.tensor([True, False])], 2)


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, float("inf")])
def test_norm(ord):
    xs = tensors(torch.float32, shapes=[(), (2, 3), (4,)])
    assert_matches_torch(torch._foreach_norm, xs, ord)
    assert_matches_torch(torch._foreach_norm, tensors(torch.bfloat16, shapes=[(2, 3)]), ord, torch.float32)
    assert_matches_torch(torch._foreach_norm, tensors(torch.complex64, shapes=[(2, 3)]), ord)
    assert_matches_torch(torch._foreach_norm, tensors(torch.float64, shapes=[(2, 3), (4,)]), 2, grad=True)
    if ord != float("inf"):
        assert_matches_torch(torch._foreach_norm, tensors(torch.float32), ord)
        assert_matches_torch(torch._foreach_powsum, xs, ord)


def test_norm_accumulates_in_float32():
    """4,096 equal bfloat16 numbers: adding them up in bfloat16 would stop at 256."""
    assert_matches_torch(torch._foreach_norm, [torch.ones(4096, dtype=torch.bfloat16)], 1)


@pytest.mark.parametrize("ord", [float("inf"), float("-inf"), -1, -2.5])
def test_norms_of_nothing(ord):
    assert_same_error(torch._foreach_norm, [torch.ones(2), torch.ones(0)], ord)


def test_max():
    assert_matches_torch(torch._foreach_max, tensors(torch.float32, shapes=[(), (2, 3)]) + [torch.tensor([1, 5])])
    assert_matches_torch(torch._foreach_max, [torch.tensor([1.0, float("nan")])])
    assert_same_error(torch._foreach_max, [torch.ones(0)])


def test_copy_zero():
    def copy(xs, ys):
        torch._foreach_copy_(xs, ys)
        return xs

    assert_matches_torch(copy, mixed(torch.float32, torch.int32), mixed(torch.float64, torch.float32, seed=3))
    assert_matches_torch(copy, [torch.zeros(2, 3)], [torch.tensor([1, 2, 3])])

    def zero(xs):
        torch._foreach_zero_(xs)
        return xs

    assert_matches_torch(zero, tensors(torch.float32))


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch before 2.12 has no such op")
def test_clone():
    assert_matches_torch(torch.ops.aten._foreach_clone, tensors(torch.float32))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 has no such op")
def test_mm():
    a, b = (
        [sample((2, 3), torch.float32), sample((4, 1), torch.float32)],
        [sample((3, 5), torch.float32), sample((1, 2), torch.float32)],
    )
    assert_matches_torch(torch.ops.aten._foreach_mm, a, b)


# -- fused steps -------------------------------------------------------------------------------------------------------


def state(dtype, count):
    return [tensors(dtype, seed=10 * i, low=0.1, high=1) for i in range(count)]


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
def test_fused_adam(name, dtype, found_inf):
    for amsgrad, maximize, lr in [(False, False, 0.01), (True, True, torch.tensor(0.01))]:
        params, grads, first, second, third = state(dtype, 5)
        assert_matches_torch(
            getattr(torch.ops.aten, name),
            params,
            grads,
            first,
            second,
            third if amsgrad else [],
            [torch.tensor(3.0) for _ in SHAPES],
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=amsgrad,
            maximize=maximize,
            grad_scale=None if found_inf is None else torch.tensor(4.0),
            found_inf=None if found_inf is None else torch.tensor(found_inf),
        )


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_fused_sgd(found_inf):
    cases = [(0.0, False, False), (0.9, False, True), (0.9, False, False), (0.9, True, False)]
    for momentum, nesterov, first_step in cases:
        params, grads, buffers = state(torch.float32, 3)
        assert_matches_torch(
            torch.ops.aten._fused_sgd,
            params,
            grads,
            buffers if momentum else [],
            weight_decay=0.1,
            momentum=momentum,
            lr=0.1,
            dampening=0.0 if nesterov else 0.2,
            nesterov=nesterov,
            maximize=nesterov,
            is_first_step=first_step,
            grad_scale=None if found_inf is None else torch.tensor(4.0),
            found_inf=None if found_inf is None else torch.tensor(found_inf),
        )


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_fused_adagrad(lr):
    params, grads, sums = state(torch.float32, 3)
    assert_matches_torch(
        torch.ops.aten._fused_adagrad,
        params,
        grads,
        sums,
        [torch.tensor(5.0) for _ in SHAPES],
        lr=lr,
        lr_decay=0.01,
        weight_decay=0.1,
        eps=1e-10,
        maximize=True,
    )


def trained(optimizer, **options):
    """The parameters of a small model after five steps on made-up gradients."""

    def run(params, gradients):
        params = [torch.nn.Parameter(p) for p in params]
        step = optimizer(params, **options)
        for i in range(5):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g * (i + 1)
            step.step()
        return [p.detach() for p in params]

    return run


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {}])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr_decay": 0.1}),
    ],
)
def test_optimizers(optimizer, options, way):
    params, gradients = (tensors(torch.float32, seed=s, shapes=[(2, 3), (4,), ()]) for s in (0, 9))
    assert_matches_torch(trained(optimizer, **options, **way), params, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_foreach_optimizers(optimizer):
    params, gradients = (tensors(torch.float32, seed=s, shapes=[(2, 3), (4,)]) for s in (0, 9))
    assert_matches_torch(trained(optimizer, foreach=True), params, gradients, rtol=1e-5, atol=1e-6)


def test_clip_grad_norm():
    def clip(params, gradients):
        params = [torch.nn.Parameter(p) for p in params]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        return norm, [p.grad for p in params]

    assert_matches_torch(clip, tensors(torch.float32), tensors(torch.float32, seed=9))


# -- loss scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscale_finds_what_is_not_finite(bad):
    """CPU has no such kernel, so the result is written out."""
    grads = [g.to("jax") for g in tensors(torch.float32) + tensors(torch.bfloat16, seed=9)]
    before = [g.cpu() for g in grads]
    if bad is not None:
        grads[2][0, 0] = bad
    found = torch.zeros(1, device="jax")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([0.5], device="jax"))
    assert found.item() == (bad is not None)
    for i, (g, b) in enumerate(zip(grads, before, strict=True)):
        if i != 2:
            assert g.dtype == b.dtype
            torch.testing.assert_close(g.cpu(), b * 0.5)


def test_update_scale():
    scale, tracker = torch.full((1,), 8.0, device="jax"), torch.zeros(1, dtype=torch.int32, device="jax")

    def update(found):
        torch._amp_update_scale_(scale, tracker, torch.full((1,), found, device="jax"), 2.0, 0.5, 2)
        return scale.item(), tracker.item()

    assert update(0.0) == (8.0, 1)
    assert update(0.0) == (16.0, 0)
    assert update(0.0) == (16.0, 1)
    assert update(1.0) == (8.0, 0)


def test_update_scale_does_not_grow_to_infinity():
    scale, tracker = torch.full((1,), 3e38, device="jax"), torch.zeros(1, dtype=torch.int32, device="jax")
    torch._amp_update_scale_(scale, tracker, torch.zeros(1, device="jax"), 2.0, 0.5, 1)
    assert scale.item() == pytest.approx(3e38)
    assert tracker.item() == 0


def test_optimizers_choose_foreach_by_themselves():
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _has_foreach_support

    weight = torch.nn.Parameter(torch.ones(2))
    assert _default_to_fused_or_foreach([weight], False) == (False, False)
    ours = torch.nn.Parameter(torch.ones(2, device="jax"))
    assert _default_to_fused_or_foreach([ours, ours[:1]], False) == (False, True)
    assert _has_foreach_support([ours, ours[:1]], ours.device)
