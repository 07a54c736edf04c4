"""pointwise.py against CPU torch: dtypes, broadcasting, forms, gradients, and the corners of each formula."""

import math

import pytest
import torch

from torchax_core.testing import assert_matches_torch, assert_same_error, sample

NAN, INF = math.nan, math.inf
ALL = ("functional", "inplace", "out")
REAL = [torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64]
# no subnormal numbers, nor those whose inverse is one: XLA takes them for 0
EDGES = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, -0.5, 1.5, 1e30])


# -- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, *REAL, torch.complex64, torch.complex128])
@pytest.mark.parametrize("fn", [torch.add, torch.mul])
def test_add_and_mul(fn, dtype):
    assert_matches_torch(fn, sample((4, 3), dtype).t(), sample((4,), dtype, seed=1))


def test_shapes_and_forms():
    for fn in [torch.add, torch.mul]:
        for shape in [(), (0,), (2, 3)]:
            assert_matches_torch(fn, sample(shape, torch.float32), sample(shape, torch.float32, seed=1))
        for dtype in [torch.int64, torch.bfloat16]:
            assert_matches_torch(fn, sample((2, 3), dtype), sample((3,), dtype, seed=1), forms=ALL)


@pytest.mark.parametrize("fn", [torch.add, torch.sub, torch.rsub])
@pytest.mark.parametrize("alpha", [1, 2, -3])
def test_alpha(fn, alpha):
    for dtype in [torch.int64, torch.float32]:
        assert_matches_torch(fn, sample((2, 3), dtype), sample((2, 3), dtype, seed=1), alpha=alpha)
    x, y = sample((2, 3), torch.float64), sample((3,), torch.float64, seed=1)
    assert_matches_torch(fn, x, y, alpha=alpha + 0.5, grad=True)


@pytest.mark.parametrize("fn", [torch.add, torch.sub, torch.mul, torch.div])
def test_dtypes_are_promoted(fn):
    half, single, double, whole = (
        sample((3,), d, low=1, high=5, seed=i)
        for i, d in enumerate([torch.bfloat16, torch.float32, torch.float64, torch.int64])
    )
    assert_matches_torch(fn, half, single)
    assert_matches_torch(fn, whole, half)
    assert_matches_torch(fn, single, double[0])  # a 0-d tensor does not widen
    assert_matches_torch(fn, whole, 2.5)
    assert_matches_torch(fn, half, 3)
    assert_matches_torch(fn, single, 2 + 1j)


def test_a_python_number_is_not_narrowed():
    assert_matches_torch(torch.add, torch.tensor([2**60]), 2**60 + 1)
    assert_matches_torch(torch.mul, torch.ones(2, dtype=torch.float64), 0.1)
    assert_matches_torch(torch.add, torch.ones(2, dtype=torch.bfloat16), 1e-4)


def test_adding_a_complex_infinity_makes_no_nan():
    z = torch.tensor([complex(INF, 0), complex(0, -INF)])
    # where torch, multiplying by the default alpha, does: nothing to compare with
    total = torch.ones(2, dtype=torch.complex64, device="jax") + z.to("jax")
    assert total.tolist() == [complex(INF, 0), complex(1, -INF)]


def test_bools_are_not_subtracted():
    a = torch.tensor([True, False])
    assert_same_error(torch.sub, a, a, wording=True)
    assert_same_error(torch.rsub, a, a, wording=True)
    assert_same_error(torch.neg, a, wording=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_div(dtype):
    assert_matches_torch(torch.div, sample((2, 3), dtype), sample((3,), dtype, seed=1), forms=ALL)
    assert_matches_torch(torch.div, sample((2, 3), dtype), 3)
    if not dtype.is_complex:
        assert_matches_torch(torch.div, EDGES.to(dtype), EDGES.to(dtype)[:, None])


def test_div_of_integers():
    a, b = sample((4, 5), torch.int64), sample((5,), torch.int64, low=1, high=5, seed=1)
    assert_matches_torch(torch.div, a, b)
    assert_matches_torch(torch.div, a, b, rounding_mode=None)
    assert_matches_torch(torch.div, torch.tensor([2**40 + 1]), 3)


@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_div_rounded(mode, dtype):
    a, b = sample((6, 7), dtype), sample((7,), dtype, seed=1)
    b = torch.where(b == 0, torch.ones_like(b), b)
    assert_matches_torch(torch.div, a, b, rounding_mode=mode, forms=ALL if dtype == torch.int64 else ("functional",))
    assert_matches_torch(torch.div, a, 3, rounding_mode=mode)
    assert_matches_torch(torch.floor_divide, a, b)


def test_floor_division_at_the_edges():
    for mode in ["trunc", "floor"]:
        assert_matches_torch(torch.div, EDGES, EDGES[:, None], rounding_mode=mode)
    # 1 / 0.1 rounds up to 10, but 0.1 is a little more than a tenth
    assert_matches_torch(torch.floor_divide, torch.tensor([1.0, -1.0, 0.6]), torch.tensor([0.1, 0.1, 0.2]))
    least = torch.tensor([-(2**63), 2**63 - 1, -7, 7])
    assert_matches_torch(torch.floor_divide, least, torch.tensor([2, -2, 2, -2]))
    assert_same_error(torch.div, EDGES, 2, rounding_mode="up", wording=True)


@pytest.mark.parametrize("fn", [torch.fmod, torch.remainder])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_fmod_and_remainder(fn, dtype):
    a, b = sample((6, 7), dtype), sample((7,), dtype, seed=1)
    b = torch.where(b == 0, torch.ones_like(b), b)
    assert_matches_torch(fn, a, b)
    assert_matches_torch(fn, a, 3)
    if dtype.is_floating_point:
        assert_matches_torch(fn, EDGES.to(dtype), EDGES.to(dtype)[:, None])
    if dtype == torch.float64:
        assert_matches_torch(fn, a, b, grad=True)


def test_remainder_of_a_number():
    assert_matches_torch(torch.remainder, 7, torch.tensor([3, -4, 5]))
    assert_matches_torch(torch.remainder, -7.5, sample((3,), torch.float32))


@pytest.mark.parametrize("fn", [torch.addcmul, torch.addcdiv])
def test_addcmul_and_addcdiv(fn):
    for dtype in [torch.float32, torch.bfloat16, torch.complex64, torch.float64]:
        x, a, b = sample((2, 3), dtype), sample((3,), dtype, seed=1), sample((2, 1), dtype, low=1, seed=2)
        assert_matches_torch(fn, x, a, b, value=0.5, grad=dtype == torch.float64)
    assert_matches_torch(fn, x, a, b, forms=ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_lerp(dtype):
    a, b = sample((2, 3), dtype), sample((2, 3), dtype, seed=1)
    for weight in [0.25, 0.5, 0.9]:
        assert_matches_torch(torch.lerp, a, b, weight)
    assert_matches_torch(torch.lerp, a, b, sample((3,), dtype, low=0, high=1, seed=2))
    assert_matches_torch(torch.lerp, torch.tensor([1e8]), torch.tensor([1.0]), 1.0)  # meets the end exactly
    if dtype == torch.float64:
        assert_matches_torch(torch.lerp, a, b, sample((3,), dtype, seed=2), grad=True)


# -- powers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-2, -1, -0.5, 0, 0.5, 1, 2, 3, 2.5, 7, -3.0])
def test_pow_with_a_number(exponent):
    x = sample((2, 3), torch.float32, low=0.1)
    assert_matches_torch(torch.pow, x, exponent)
    assert_matches_torch(torch.pow, x.double(), exponent, grad=True)
    assert_matches_torch(torch.pow, x.bfloat16(), exponent)
    assert_matches_torch(torch.pow, EDGES, exponent)
    if exponent >= 0:
        assert_matches_torch(torch.pow, sample((2, 3), torch.int64), exponent)
    assert_matches_torch(torch.pow, exponent, x)


def test_pow_of_complex():
    z = sample((2, 3), torch.complex128)
    for exponent in [2, 0.5, -1.5, 1 + 2j]:
        assert_matches_torch(torch.pow, z, exponent, grad=True)
    assert_matches_torch(torch.pow, z, sample((3,), torch.complex128, seed=1))
    assert_matches_torch(torch.pow, sample((2, 3), torch.float64, low=0.1), 1 + 2j)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_pow_of_integers_is_modular(dtype):
    low = 0 if dtype == torch.uint8 else -5
    base, exponent = sample((5, 6), dtype, low=low, high=6), sample((6,), dtype, low=low, high=90, seed=1)
    assert_matches_torch(torch.pow, base, exponent, forms=("functional", "inplace"))
    assert_matches_torch(torch.pow, 3, exponent.abs())
    assert_matches_torch(torch.pow, base, 41)


def test_pow_of_the_negative_and_bool():
    assert_matches_torch(torch.pow, torch.tensor([-2.0, -8.0, 0.0, 0.0]), torch.tensor([3.0, 1 / 3, 0.0, -1.0]))
    assert_matches_torch(torch.pow, torch.tensor([True, False]), 2)
    assert_same_error(torch.pow, torch.tensor([2, 3]), -1, wording=True)
    assert_matches_torch(torch.float_power, torch.tensor([2, 3]), -1)


# -- elementary functions ------------------------------------------------------------------------

UNARY = {
    "acos": (-1, 1), "acosh": (1, 5), "asin": (-1, 1), "asinh": (-5, 5), "atan": (-5, 5), "atanh": (-0.9, 0.9),
    "cos": (-9, 9), "cosh": (-5, 5), "exp": (-5, 5), "exp2": (-5, 5), "expm1": (-1, 1), "log": (0.1, 9),
    "log10": (0.1, 9), "log1p": (-0.9, 9), "log2": (0.1, 9), "reciprocal": (0.5, 5), "rsqrt": (0.1, 5),
    "sin": (-9, 9), "sinc": (-3, 3), "sinh": (-5, 5), "sqrt": (0, 5), "square": (-5, 5), "tan": (-1, 1),
    "tanh": (-5, 5), "deg2rad": (-180, 180), "rad2deg": (-5, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_elementary_functions(name):
    fn, (low, high) = getattr(torch, name), UNARY[name]
    assert_matches_torch(fn, sample((2, 3), torch.float64, low=low, high=high), grad=True)
    assert_matches_torch(fn, sample((3,), torch.bfloat16, low=low, high=high))
    assert_matches_torch(fn, torch.tensor([1, 0, 1]))
    assert_matches_torch(
        fn, EDGES[:-2]
    )  # XLA and torch differ in subnormal numbers and in the reduction of huge angles
    if name not in ("deg2rad", "rad2deg"):
        assert_matches_torch(fn, sample((2, 3), torch.complex128))


def test_forms_of_elementary_functions():
    for fn in [torch.exp, torch.tanh]:
        assert_matches_torch(fn, sample((2, 3), torch.float32), forms=ALL)
        assert_matches_torch(fn, sample((2, 3), torch.complex128), grad=True)
        assert_matches_torch(fn, torch.tensor([1, 2]), forms=ALL)  # no integer can hold the result


def test_logarithms_of_powers_are_whole():
    for dtype in [torch.float32, torch.float64]:
        assert_matches_torch(
            lambda x: torch.log2(x) == torch.arange(-99, 99).to(x), 2.0 ** torch.arange(-99, 99).to(dtype)
        )
        assert_matches_torch(lambda x: torch.log10(x).floor(), torch.tensor([10.0**k for k in range(10)], dtype=dtype))
        assert_matches_torch(lambda x: torch.exp2(x).to(torch.int64), torch.arange(30).to(dtype))


@pytest.mark.parametrize("fn", [torch.atan2, torch.hypot, torch.logaddexp, torch.logaddexp2])
def test_functions_of_two(fn):
    assert_matches_torch(fn, sample((2, 3), torch.float32), sample((3,), torch.float32, seed=1))
    assert_matches_torch(fn, sample((2, 3), torch.float64), sample((3,), torch.float64, seed=1), grad=True)
    assert_matches_torch(fn, sample((3,), torch.bfloat16), sample((3,), torch.bfloat16, seed=1))
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1000.0, 1000.0])
    assert_matches_torch(fn, special, special[:, None])


def test_logaddexp_of_complex():
    assert_matches_torch(torch.logaddexp, sample((5,), torch.complex128), sample((5,), torch.complex128, seed=1))
    assert_matches_torch(torch.hypot, torch.tensor([3e30]), torch.tensor([4e30]))


# -- signs and parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [torch.abs, torch.neg, torch.sign, torch.sgn, torch.angle])
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.complex128])
def test_signs(fn, dtype):
    if fn is torch.sign and dtype.is_complex:
        pytest.skip("sign is not for complex numbers")
    assert_matches_torch(fn, sample((2, 3), dtype), grad=dtype in (torch.float64, torch.complex128))
    if dtype.is_complex:
        assert_matches_torch(fn, torch.tensor([0j, 1 + 1j, -2], dtype=dtype))
    elif dtype.is_floating_point:
        assert_matches_torch(fn, EDGES.to(dtype))


def test_conj_physical():
    for dtype in [torch.complex64, torch.float32, torch.int64]:
        assert_matches_torch(torch.conj_physical, sample((2, 3), dtype), forms=ALL)
    assert_matches_torch(torch.conj_physical, sample((2, 3), torch.complex128), grad=True)
    assert_matches_torch(torch.conj_physical, sample((2, 3), torch.float64), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_copysign_and_nextafter(dtype):
    x = EDGES.to(dtype)
    assert_matches_torch(torch.copysign, x, x[:, None])
    assert_matches_torch(torch.copysign, x, -2.0)
    assert_matches_torch(torch.copysign, torch.tensor([1, -2]), torch.tensor([-0.0, 1.0]))
    x = x[:-1]
    assert_matches_torch(lambda a, b: torch.nextafter(a, b)[a != 0], x.expand(12, 12), x[:, None].expand(12, 12))
    if dtype == torch.float64:
        assert_matches_torch(torch.copysign, sample((4,), dtype), sample((4,), dtype, seed=1), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_frexp(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, 0.5, -3.0, 1e30, 1e-30, 0.1], dtype=dtype)
    assert_matches_torch(torch.frexp, x)
    assert_matches_torch(lambda x: torch.frexp(x).mantissa, torch.tensor([INF, -INF, NAN], dtype=dtype))
    assert_matches_torch(lambda x: torch.ldexp(*torch.frexp(x)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_and_polar(dtype):
    a, b = sample((2, 3), dtype), sample((3,), dtype, seed=1)
    for fn in [torch.complex, torch.polar]:
        assert_matches_torch(fn, a, b, forms=("functional", "out"), grad=dtype == torch.float64)


def test_complex_of_two_dtypes():
    assert_same_error(torch.complex, torch.ones(2), torch.ones(2).double(), wording=True)


# -- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [torch.ceil, torch.floor, torch.round, torch.trunc, torch.frac])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_rounding(fn, dtype):
    if fn is torch.frac and not dtype.is_floating_point:
        pytest.skip("integers have no fraction")
    assert_matches_torch(fn, sample((2, 3), dtype))
    if dtype.is_floating_point:
        x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -0.2, INF, NAN], dtype=dtype)
        assert_matches_torch(fn, x[:7] if fn is torch.frac else x)
    if dtype == torch.int64:
        assert_matches_torch(fn, torch.tensor([2**60 + 1]))


@pytest.mark.parametrize("decimals", [-2, -1, 0, 1, 3])
def test_round_to_decimals(decimals):
    for dtype in [torch.float32, torch.float64]:
        assert_matches_torch(torch.round, sample((20,), dtype, low=-999, high=999), decimals=decimals)


# -- choosing and bounding -----------------------------------------------------------------------


def test_where():
    condition = sample((2, 3), torch.bool)
    for dtype in [torch.bool, torch.int64, torch.bfloat16, torch.complex64]:
        assert_matches_torch(torch.where, condition, sample((3,), dtype), sample((2, 1), dtype, seed=1))
    assert_matches_torch(torch.where, condition, sample((3,), torch.int64), 2.5)
    assert_matches_torch(torch.where, condition, sample((3,), torch.float32), sample((3,), torch.float64, seed=1))
    assert_matches_torch(torch.where, condition, 1.0, 0.0)
    a, b = sample((2, 3), torch.float64), sample((3,), torch.float64, seed=1)
    assert_matches_torch(lambda c, a, b: torch.where(c, a, b * NAN), condition, a, b, grad=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_clamp(dtype):
    x, a, b = (sample((2, 3), dtype, seed=i) for i in range(3))
    assert_matches_torch(torch.clamp, x, 1, 4, forms=ALL)
    assert_matches_torch(torch.clamp, x, min=2)
    assert_matches_torch(torch.clamp, x, max=2)
    assert_matches_torch(torch.clamp, x, 4, 1)
    assert_matches_torch(torch.clamp, x, a, b, grad=dtype == torch.float64)
    assert_matches_torch(torch.clamp_min, x, 2)
    assert_matches_torch(torch.clamp_max, x, a)


def test_clamp_at_the_edges():
    assert_matches_torch(torch.clamp, EDGES, -1.5, 1.5, grad=True)
    assert_matches_torch(torch.clamp, EDGES, min=NAN)
    assert_matches_torch(torch.clamp, torch.tensor([1, 5]), 0.5, 2.5)
    assert_same_error(torch.clamp, EDGES, wording=True)
    assert_same_error(torch.clamp, EDGES + 0j, min=1, wording=True)


def test_nan_to_num():
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16]:
        assert_matches_torch(torch.nan_to_num, EDGES.to(dtype))
        assert_matches_torch(torch.nan_to_num, EDGES.to(dtype), nan=2.0, posinf=3.0, neginf=-3.0)
    assert_matches_torch(torch.nan_to_num, sample((3,), torch.int64), 1.0)
    assert_matches_torch(torch.nan_to_num, torch.complex(EDGES, EDGES.flip(0)), 1.0)
    assert_matches_torch(torch.nan_to_num, EDGES.double(), grad=True)


def test_heaviside():
    assert_matches_torch(torch.heaviside, EDGES, torch.full((), 0.25), forms=("functional", "out"))
    assert_matches_torch(torch.heaviside, sample((2, 3), torch.int64, low=-1, high=2), torch.tensor([5, 6, 7]))
    assert_same_error(torch.heaviside, EDGES, EDGES.double(), wording=True)


# -- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [torch.gcd, torch.lcm])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_gcd_and_lcm(fn, dtype):
    assert_matches_torch(fn, sample((5, 6), dtype), sample((6,), dtype, seed=1))
    assert_matches_torch(fn, torch.tensor([0, 0, 5], dtype=dtype), torch.tensor([0, 4, 0], dtype=dtype))


def test_gcd_of_the_least_integer():
    # torch gives -2 here: its absolute value of the least integer is negative
    x = torch.tensor([-(2**63), 6], device="jax")
    assert torch.gcd(x, x.flip(0)).tolist() == [2, 2]
    assert_same_error(torch.gcd, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("fn", [torch.bitwise_left_shift, torch.bitwise_right_shift])
def test_shifts(fn, dtype):
    x, by = sample((5, 6), dtype), sample((6,), dtype, low=0, high=9, seed=1)
    assert_matches_torch(fn, x, by, forms=ALL if dtype == torch.int8 else ("functional",))
    assert_matches_torch(fn, x, 2)
    assert_matches_torch(fn, 5, by)
    assert_matches_torch(fn, x, torch.tensor([0, 1, 7, 8, 63, 64]).to(dtype))
    assert_matches_torch(lambda a, b: (a << b, a >> b), x, by)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.complex64])
def test_kron(dtype):
    a, b = sample((2, 3), dtype), sample((2, 2), dtype, seed=1)
    assert_matches_torch(torch.kron, a, b, forms=("functional", "out"), grad=dtype.is_floating_point)
    assert_matches_torch(torch.kron, a[0], b)


def test_conj_physical_of_a_real_tensor_is_itself():
    x = torch.ones(2, device="jax")
    assert x.conj_physical() is x
    assert_matches_torch(torch.conj_physical, sample((3,), torch.complex64), forms=ALL, grad=True)
    assert_matches_torch(torch.conj_physical, sample((3,), torch.float32), forms=("inplace", "out"))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_powers(dtype):
    base = torch.cat([sample((50,), dtype), torch.zeros(4, dtype=dtype)])
    exponent = torch.tensor([1 + 1j, -1 + 1j, 0.5, -2], dtype=dtype).repeat(14)[:54]
    assert_matches_torch(torch.pow, base, exponent)
    for number in (1 + 1j, -1 + 1j, 2.5, -0.5, 0):
        assert_matches_torch(torch.pow, base, number)


@pytest.mark.parametrize(("dtype", "divisor"), [(torch.float32, 41.0), (torch.float64, 49.0), (torch.float64, 0.1)])
def test_whole_quotients_by_a_number_are_whole(dtype, divisor):
    x = torch.arange(-300, 300, dtype=dtype) * divisor
    assert_matches_torch(torch.div, x, divisor, rounding_mode="trunc")
    assert_matches_torch(torch.div, x, divisor, rounding_mode="floor")
