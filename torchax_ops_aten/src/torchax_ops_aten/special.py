"""Special functions, element by element: error and gamma functions, zeta, Bessel and Airy functions, polynomials.

Where JAX has none, they follow the Cephes library, as torch's CPU kernels do.
Source: S. L. Moshier, "Methods and Programs for Mathematical Functions"; https://netlib.org/cephes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import INT_TO_FLOAT
from torchax_ops_aten._derivatives import derivatives

ops = OpSet("torchax_ops_aten.special")


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """The polynomial of these coefficients at `x`, that of the highest power first (Horner)."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _ratio(x: jax.Array, numerator: Sequence[float], denominator: Sequence[float]) -> jax.Array:
    return _polynomial(x, numerator) / _polynomial(x, denominator)


def _chebyshev_series(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """The series of Chebyshev polynomials of `x / 2`, highest order first, half of the last one counted (Clenshaw)."""
    before = earlier = jnp.zeros_like(x)
    now = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, earlier = earlier, now
        now = x * earlier - before + coefficient
    return 0.5 * (now - before)


# -- error functions and the normal distribution ---------------------------------------------------

# erfc(x) = exp(-x**2) times these ratios: the first for x in [1, 8), the second beyond.
_ERFC_NEAR = (
    (
        2.461969814735305e-10, 0.5641895648310688, 7.463210564422699, 48.63719709856814, 196.5208329560771,
        526.4451949954773, 934.5285271719576, 1027.5518868951572, 557.5353353693994,
    ),
    (
        1.0, 13.228195115474499, 86.70721408859897, 354.9377788878199, 975.7085017432055, 1823.9091668790973,
        2246.3376081871097, 1656.6630919416134, 557.5353408177277,
    ),
)  # fmt: skip
_ERFC_FAR = (
    (
        0.5641895835477551, 1.275366707599781, 5.019050422511805, 6.160210979930536, 7.4097426995044895,
        2.9788666537210022,
    ),
    (
        1.0, 2.2605286322011726, 9.396035249380015, 12.048953980809666, 17.08144507475659, 9.608968090632859,
        3.369076451000815,
    ),
)  # fmt: skip


@derivatives(x=lambda tangent, x: tangent * (2 * x * _erfcx(x) - 2 / math.sqrt(math.pi)))  # type: ignore[has-type]
def _erfcx(x: jax.Array) -> jax.Array:
    """`exp(x**2) * erfc(x)`; the ratio in which erfc is kept far from 0 is that product already."""
    size = jnp.abs(x)
    near = jnp.exp(size * size) * lax.erfc(size)
    far = jnp.where(size < 8, _ratio(jnp.minimum(size, 8), *_ERFC_NEAR), _ratio_at_infinity(size, *_ERFC_FAR))
    right = jnp.where(size < 1, near, far)
    return jnp.where(x < 0, 2 * jnp.exp(x * x) - right, right)


def _ratio_at_infinity(x: jax.Array, numerator: Sequence[float], denominator: Sequence[float]) -> jax.Array:
    """`_ratio` for large `x`, by powers of `1 / x`, which do not overflow."""
    inverse = 1 / x
    drop = len(denominator) - len(numerator)
    return inverse**drop * _ratio(inverse, numerator[::-1], denominator[::-1])


@derivatives(x=lambda tangent, x: tangent * math.sqrt(2 / math.pi) / _erfcx(-x * math.sqrt(0.5)))
def _log_ndtr(x: jax.Array) -> jax.Array:
    """The logarithm of the normal distribution function; far to the left, where that underflows, by way of erfcx."""
    t = x * math.sqrt(0.5)
    left = jnp.minimum(t, 0)
    return jnp.where(x < -1, jnp.log(_erfcx(-left) / 2) - left * left, jnp.log1p(-lax.erfc(t) / 2))


ops.table(
    INT_TO_FLOAT,
    {
        "aten::erf": lax.erf,
        "aten::erfc": lax.erfc,
        "aten::erfinv": lax.erf_inv,
        "aten::special_erfcx": _erfcx,
        "aten::special_log_ndtr": _log_ndtr,
        "aten::special_ndtri": jax.scipy.special.ndtri,
    },
)


@ops.lowering("aten::logit", promote=INT_TO_FLOAT)
def logit(self, eps=None):
    """`log(self / (1 - self))`, of `self` moved into [eps, 1 - eps] if `eps` is given and not negative."""
    if eps is not None:
        # the lower bound counts where `eps` is so large that the bounds have crossed
        moved = jnp.where(self < eps, eps, jnp.minimum(self, 1 - eps))
        self = jnp.where(eps < 0, self, moved)
    return jnp.log(self / (1 - self))


@ops.lowering("aten::logit_backward", promote=INT_TO_FLOAT)
def logit_backward(grad_output, self, eps=None):
    """`grad_output / (self * (1 - self))`; 0 where `self` was moved, NaN outside [0, 1] without `eps`."""
    slope = grad_output / (self * (1 - self))
    if eps is None:
        return jnp.where((self >= 0) & (self <= 1), slope, jnp.nan)
    outside = jnp.where(eps < 0, jnp.nan, 0)
    eps = jnp.maximum(eps, 0)
    return jnp.where((self >= eps) & (self <= 1 - eps), slope, outside)


# -- products with logarithms ----------------------------------------------------------------------


def _times_log(log: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`x * log(y)`, 0 where `x` is 0 whatever `log(y)` is, unless `y` is NaN."""
    return lambda x, y: jnp.where((x == 0) & ~jnp.isnan(y), 0, x * log(y))


_xlogy, _xlog1py = _times_log(jnp.log), _times_log(jnp.log1p)


def _entr(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0, -jnp.inf, -_xlogy(x, x))


ops.table(
    INT_TO_FLOAT,
    {
        "aten::xlogy.Tensor": _xlogy,
        "aten::xlogy.Scalar_Self": _xlogy,
        "aten::xlogy.Scalar_Other": _xlogy,
        "aten::special_xlog1py": _xlog1py,
        "aten::special_xlog1py.self_scalar": _xlog1py,
        "aten::special_xlog1py.other_scalar": _xlog1py,
        "aten::special_entr": _entr,
    },
)


# -- gamma and zeta functions ----------------------------------------------------------------------

_MOST_SHIFTS = 4096  # bounds the loop of `_zeta` for huge negative arguments, which adding 1 does not change


def _zeta(x: jax.Array, q: jax.Array) -> jax.Array:
    """The Hurwitz zeta function: the sum of `(q + k)**-x` over k = 0, 1, 2, ...

    inf at its poles (`x == 1`, `q` = 0, -1, -2, ...), NaN where it is not defined or, for `x < 1`, the sum diverges.
    JAX's is only right for `q` above -9: terms are split off until `q` is positive.
    """
    x, q = jnp.broadcast_arrays(x, q)
    pole = (q <= 0) & (q == jnp.floor(q))
    undefined = (q < 0) & (x != jnp.floor(x))
    value = _zeta_inside(x, jnp.where(pole | undefined, 1, q))
    value = jnp.where(pole, jnp.inf, jnp.where(undefined, jnp.nan, value))
    return jnp.where(x == 1, jnp.inf, jnp.where(x < 1, jnp.nan, value))


def _zeta_inside(x: jax.Array, q: jax.Array) -> jax.Array:
    # terms left and right of 0 may cancel, so both are summed one by one before the rest is added
    limit = jnp.where(q < 0, 2, -jnp.inf)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        count, total, q = state
        below = q < limit
        return count + 1, jnp.where(below, total + jnp.power(q, -x), total), jnp.where(below, q + 1, q)

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        count, _, q = state
        return (count < _MOST_SHIFTS) & jnp.any(q < limit)

    _, total, q = lax.while_loop(unfinished, step, (jnp.int32(0), jnp.zeros_like(q), q))
    return total + lax.zeta(x, q)


@derivatives(x=lambda tangent, x: tangent * _trigamma(x))
def _digamma(x: jax.Array) -> jax.Array:
    # torch has the limits from either side at 0; JAX has NaN there, as at the other poles
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


def _trigamma(x: jax.Array) -> jax.Array:
    """zeta(2, x); left of 0 by reflection. As in torch, the poles there are hit as closely only as pi is."""
    mirrored = jnp.where(x < 0, 1 - x, x)
    value = jnp.where(x == jnp.inf, 0, lax.zeta(jnp.full_like(x, 2), mirrored))
    return jnp.where(x < 0, (math.pi / jnp.sin(math.pi * x)) ** 2 - value, value)


@ops.lowering("aten::polygamma", promote=INT_TO_FLOAT)
@derivatives(self=lambda tangent, n, self: tangent * polygamma(n + 1, self))  # type: ignore[has-type]
def polygamma(n, self):
    """The `n`-th derivative of digamma: `(-1)**(n + 1) * n! * zeta(n + 1, self)` for n > 0."""
    if n < 0:
        raise RuntimeError("polygamma(n, x) does not support negative n.")
    if n == 0:
        return _digamma(self)
    if n == 1:
        return _trigamma(self)
    factorial = jnp.exp(lax.lgamma(jnp.asarray(n + 1, self.dtype)))
    return (1 if n % 2 else -1) * factorial * _zeta(jnp.asarray(n + 1, self.dtype), self)


@ops.lowering("aten::igamma", promote=INT_TO_FLOAT)
def igamma(self, other):
    """The regularized lower incomplete gamma function of `self` at `other`; NaN if one of them is negative."""
    return _incomplete_gamma(self, other, upper=False)


@ops.lowering("aten::igammac", promote=INT_TO_FLOAT)
def igammac(self, other):
    """The upper one: 1 less the lower."""
    return _incomplete_gamma(self, other, upper=True)


_MOST_TERMS = 2000


def _incomplete_gamma(a: jax.Array, x: jax.Array, upper: bool) -> jax.Array:
    """By a power series for the lower function where `x < a + 1`, by a continued fraction for the upper one beyond.

    Not lax.igamma: that is off by 1e-4 in float32 for large `a`, and for float64 fails when it is lowered without x64.
    """
    a, x = jnp.broadcast_arrays(a, x)
    inside = (a > 0) & (x > 0) & (a < jnp.inf) & (x < jnp.inf)
    left = inside & (x < a + 1)
    scale = _gamma_density(jnp.where(inside, a, 1), jnp.where(inside, x, 1))
    lower = scale * _lower_gamma_series(jnp.where(left, a, 1), jnp.where(left, x, 1))
    right = inside & ~left
    beyond = scale * a * _upper_gamma_fraction(jnp.where(right, a, 1), jnp.where(right, x, 2))
    value = jnp.where(left, 1 - lower, beyond) if upper else jnp.where(left, lower, 1 - beyond)
    near, far = (1, 0) if upper else (0, 1)  # the limits for small and for large `x`
    value = jnp.where(jnp.isinf(x), far, value)
    value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, near), value)
    value = jnp.where(x == 0, near, value)
    value = jnp.where(a == 0, jnp.where(x > 0, far, jnp.nan), value)
    return jnp.where((a < 0) | (x < 0) | jnp.isnan(a) | jnp.isnan(x), jnp.nan, value)


def _gamma_density(a: jax.Array, x: jax.Array) -> jax.Array:
    """`x**a * exp(-x) / gamma(a + 1)`; for large `a` by Stirling's formula, where the factors would cancel."""
    small = jnp.exp(a * jnp.log(x) - x - lax.lgamma(a + 1))
    excess = (x - a) / a
    inverse = 1 / a
    stirling = inverse * _polynomial(inverse * inverse, (-1 / 1680, 1 / 1260, -1 / 360, 1 / 12))
    large = jnp.exp(a * (jnp.log1p(excess) - excess) - stirling) / jnp.sqrt(2 * math.pi * a)
    return jnp.where(a < 12, small, large)


def _lower_gamma_series(a: jax.Array, x: jax.Array) -> jax.Array:
    """The sum of `x**k / ((a + 1) ... (a + k))`."""
    eps = jnp.finfo(x.dtype).eps

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, term, total = state
        term = term * x / (a + k)
        return k + 1, term, total + term

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        k, term, total = state
        return (k <= _MOST_TERMS) & jnp.any(term > eps * total)

    one = jnp.ones_like(x)
    return lax.while_loop(unfinished, step, (jnp.ones((), x.dtype), one, one))[2]


def _upper_gamma_fraction(a: jax.Array, x: jax.Array) -> jax.Array:
    """The continued fraction `1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / ...))`, from the top (Lentz)."""
    eps = jnp.finfo(x.dtype).eps
    tiny = jnp.finfo(x.dtype).tiny / eps
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

    def step(state: State) -> State:
        k, c, d, total, _ = state
        numerator = k * (a - k)
        denominator = x + 2 * k + 1 - a
        d = numerator * d + denominator
        c = denominator + numerator / c
        d = 1 / jnp.where(jnp.abs(d) < tiny, tiny, d)
        c = jnp.where(jnp.abs(c) < tiny, tiny, c)
        return k + 1, c, d, total * c * d, c * d

    def unfinished(state: State) -> jax.Array:
        k, _, _, _, factor = state
        return (k <= _MOST_TERMS) & jnp.any(jnp.abs(factor - 1) > eps)

    first = 1 / (x + 1 - a)
    start = (jnp.ones((), x.dtype), jnp.full_like(x, 1 / tiny), first, first, jnp.zeros_like(x))
    return lax.while_loop(unfinished, step, start)[3]


ops.table(
    INT_TO_FLOAT,
    {
        "aten::digamma": _digamma,
        "aten::lgamma": lax.lgamma,
        "aten::special_zeta": _zeta,
        "aten::special_zeta.self_scalar": _zeta,
        "aten::special_zeta.other_scalar": _zeta,
    },
)


# -- Bessel functions ------------------------------------------------------------------------------


class _Bessel(NamedTuple):
    """What Cephes knows of the Bessel functions J and Y of one order.

    torch leaves out the leading 1 of the denominators qq, rq and yq (Cephes' p1evl), which makes it differ from the
    true values by up to 1e-5 of them. The numbers here are torch's, so that devices agree.

    pp, pq, qp, qq: the ratios of their amplitudes and phases beyond 5, in powers of `(5 / x)**2`.
    rp, rq:         the ratio for J up to 5, in powers of `x**2`, after its first two roots are taken out.
    yp, yq:         the same for Y, after its logarithmic part is taken out.
    roots:          the squares of the first two roots of J.
    phase:          how far the waves of J lag behind a cosine.
    """

    pp: Sequence[float]
    pq: Sequence[float]
    qp: Sequence[float]
    qq: Sequence[float]
    rp: Sequence[float]
    rq: Sequence[float]
    yp: Sequence[float]
    yq: Sequence[float]
    roots: tuple[float, float]
    phase: float


_BESSEL = (
    _Bessel(
        pp=(
            0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687, 8.74716500199817,
            5.303240382353949, 1.0,
        ),
        pq=(
            0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171, 8.761908832370695,
            5.306052882353947, 1.0,
        ),
        qp=(
            -0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683, -177.68116798048806,
            -147.07750515495118, -51.41053267665993, -6.050143506007285,
        ),
        qq=(
            64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525, 5930.727011873169,
            2062.0933166032783, 242.0057402402914,
        ),
        rp=(-4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0),
        rq=(
            499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683, 2112775201154.892,
            310518229857422.56, 3.1812195594320496e+16, 1.7108629408104315e+18,
        ),
        yp=(
            15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115, 87590639439536.7,
            -3466283033847297.0, 4.4273326857256984e+16, -1.8495080043698668e+16,
        ),
        yq=(
            1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935, 20297961275010.555,
            3171577528429750.5, 2.5059625617265306e+17,
        ),
        roots=(5.783185962946784, 30.471262343662087),
        phase=math.pi / 4,
    ),
    _Bessel(
        pp=(
            0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076, 8.424045901417724,
            5.214515986823615, 1.0,
        ),
        pq=(
            0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015, 8.399855543276042,
            5.209828486823619, 1.0,
        ),
        qp=(
            0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508, 710.8563049989261,
            597.4896124006136, 211.68875710057213, 25.207020585802372,
        ),
        qq=(
            74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562, 7997.041604473507,
            2826.1927851763908, 336.0936078106983,
        ),
        rp=(-899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0),
        rq=(
            620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925, 4749141220799.914,
            784369607876235.9, 8.952223361846274e+16, 5.322786203326801e+18,
        ),
        yp=(
            1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0, 2.024394757135949e+17,
            -7.788771962659501e+17,
        ),
        yq=(
            594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617, 3882312774962.3857,
            620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18,
        ),
        roots=(14.681970642123893, 49.21845632169461),
        phase=3 * math.pi / 4,
    ),
)  # fmt: skip
# For I of order 0 up to 8 and beyond, times `exp(-x)`: series of Chebyshev polynomials.
_I0_NEAR = (
    -4.4153416464793395e-18, 3.3307945188222384e-17, -2.431279846547955e-16, 1.715391285555133e-15,
    -1.1685332877993451e-14, 7.676185498604936e-14, -4.856446783111929e-13, 2.95505266312964e-12,
    -1.726826291441556e-11, 9.675809035373237e-11, -5.189795601635263e-10, 2.6598237246823866e-09,
    -1.300025009986248e-08, 6.046995022541919e-08, -2.670793853940612e-07, 1.1173875391201037e-06,
    -4.4167383584587505e-06, 1.6448448070728896e-05, -5.754195010082104e-05, 0.00018850288509584165,
    -0.0005763755745385824, 0.0016394756169413357, -0.004324309995050576, 0.010546460394594998, -0.02373741480589947,
    0.04930528423967071, -0.09490109704804764, 0.17162090152220877, -0.3046826723431984, 0.6767952744094761,
)  # fmt: skip
_I0_FAR = (
    -7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17,
    -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15, 3.8116806693526224e-15,
    -9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13,
    7.180124451383666e-13, -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11,
    1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08,
    2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05, 0.0033691164782556943, 0.8044904110141088,
)  # fmt: skip
# For K up to 2 (without its logarithmic part) and beyond: series of Chebyshev polynomials.
_K_NEAR = (
    (
        1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
        2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615, 0.3442898999246285,
        -0.5353273932339028,
    ),
    (
        -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13, -1.4114883926335278e-10,
        -2.213387630734726e-08, -2.4334061415659684e-06, -0.0001730288957513052, -0.006975723859639864,
        -0.12261118082265715, -0.3531559607765449, 1.5253002273389478,
    ),
)  # fmt: skip
_K_FAR = (
    (
        5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16,
        5.512055978524319e-16, -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14,
        8.032890775363575e-14, -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
        1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10, -1.69753450938906e-09,
        8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
        1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645,
        2.4403030820659555,
    ),
    (
        -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16,
        -6.057047248373319e-16, 2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14,
        -8.976705182324994e-14, 3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
        -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10, 2.015049755197033e-09,
        -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07, 2.406484947837217e-06,
        -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779, 0.10392373657681724,
        2.7206261904844427,
    ),
)  # fmt: skip
# For the Airy function beyond 2.09 either way: ratios in powers of `1 / zeta`, and of its square.
_AIRY_RIGHT = (
    (
        0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058, 159.75639135016442,
        70.53609068404442, 14.026469116338967, 1.0,
    ),
    (
        0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297,
        71.47784008255756, 14.095913560783403, 1.0,
    ),
)  # fmt: skip
_AIRY_EVEN = (
    (
        -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191, -0.04919001326095003,
        -0.004062659235948854, -0.0001592764962392621, -2.776491081552329e-06, -1.6778769848911465e-08,
    ),
    (
        13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596, 1.4752914677166642,
        0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05, 4.5185009297058035e-07,
    ),
)  # fmt: skip
_AIRY_ODD = (
    (
        0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502, 0.35146565610554764,
        0.06338889196289255, 0.005858041130483885, 0.000282851600836737, 6.98793669997261e-06, 8.117892395543892e-08,
        3.415517847659236e-10,
    ),
    (
        9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755, 0.9542936116189619,
        0.08645808263523921, 0.004126565238242226, 0.00010125908511650914, 1.1716673321441352e-06,
        4.9183457006293e-09,
    ),
)  # fmt: skip
_AIRY_SERIES = tuple(
    [math.prod(1 / ((3 * j + s) * (3 * j + s - 1)) for j in range(1, k + 1)) for k in range(15, -1, -1)] for s in (0, 1)
)


def _waves(x: jax.Array, c: _Bessel) -> tuple[jax.Array, jax.Array]:
    """J and Y for `x > 5`."""
    inverse = 5 / x
    even = _ratio(inverse * inverse, c.pp, c.pq)
    odd = inverse * _ratio(inverse * inverse, c.qp, c.qq)
    cosine, sine = jnp.cos(x - c.phase), jnp.sin(x - c.phase)
    amplitude = math.sqrt(2 / math.pi) / jnp.sqrt(x)
    return (even * cosine - odd * sine) * amplitude, (even * sine + odd * cosine) * amplitude


def _bessel_j(x: jax.Array, order: int) -> jax.Array:
    """J of order 0 (even) or 1 (odd)."""
    c = _BESSEL[order]
    size = jnp.abs(x)
    square = size * size
    near = (square - c.roots[0]) * (square - c.roots[1]) * _ratio(square, c.rp, c.rq) * (size if order else 1)
    value = jnp.where(size <= 5, near, _waves(size, c)[0])
    return jnp.where(x < 0, -value, value) if order else value


def _bessel_y(x: jax.Array, order: int) -> jax.Array:
    """Y of order 0 or 1: -inf at 0, NaN left of it."""
    c = _BESSEL[order]
    logarithmic = _bessel_j(x, order) * jnp.log(x)
    regular = _ratio(x * x, c.yp, c.yq)
    if order:
        near = x * regular + (2 / math.pi) * (logarithmic - 1 / x)
    else:
        near = regular + (2 / math.pi) * logarithmic
    value = jnp.where(x <= 5, near, _waves(x, c)[1])
    return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, value))


@derivatives(x=lambda tangent, x: tangent * (lax.bessel_i1e(x) - jnp.sign(x) * _i0e(x)))  # type: ignore[has-type]
def _i0e(x: jax.Array) -> jax.Array:
    """`exp(-abs(x))` times I of order 0.

    For float64 not lax.bessel_i0e, which fails there when it is lowered without x64, as inside a user's own jax.jit.
    """
    if x.dtype != jnp.float64:
        return lax.bessel_i0e(x)  # of shorter series, and as exact
    size = jnp.abs(x)
    near = _chebyshev_series(size / 2 - 2, _I0_NEAR)
    far = _chebyshev_series(32 / size - 2, _I0_FAR) / jnp.sqrt(size)
    return jnp.where(size <= 8, near, far)


@derivatives(x=lambda tangent, x: tangent * _i1(x))
def _i0(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.abs(x)) * _i0e(x)


def _i1(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.abs(x)) * lax.bessel_i1e(x)


def _bessel_k(x: jax.Array, order: int, scaled: bool) -> jax.Array:
    """K of order 0 or 1, times `exp(x)` if `scaled`: inf at 0, NaN left of it."""
    series = _chebyshev_series(x * x - 2, _K_NEAR[order])
    near = jnp.log(0.5 * x) * _i1(x) + series / x if order else series - jnp.log(0.5 * x) * _i0(x)
    far = _chebyshev_series(8 / x - 2, _K_FAR[order]) / jnp.sqrt(x)
    value = jnp.where(x <= 2, near * jnp.exp(x), far) if scaled else jnp.where(x <= 2, near, far * jnp.exp(-x))
    return jnp.where(x == 0, jnp.inf, jnp.where(x < 0, jnp.nan, value))


def _spherical_j0(x: jax.Array) -> jax.Array:
    """`sin(x) / x`; near 0 by its series."""
    series = _polynomial(x * x, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    return jnp.where(jnp.isinf(x), 0, jnp.where(jnp.abs(x) < 0.5, series, jnp.sin(x) / x))


def _airy_ai(x: jax.Array) -> jax.Array:
    """The Airy function: waves left of 0, falling off faster than exponentially right of it. NaN at both infinities."""
    size = jnp.abs(x)
    zeta = 2 * size * jnp.sqrt(size) / 3
    inverse = 1 / zeta
    square = inverse * inverse
    fall = _ratio(inverse, *_AIRY_RIGHT) / (2 * jnp.exp(zeta))
    even, odd = 1 + square * _ratio(square, *_AIRY_EVEN), inverse * _ratio(square, *_AIRY_ODD)
    waves = jnp.sin(zeta + math.pi / 4) * even - jnp.cos(zeta + math.pi / 4) * odd
    far = jnp.where(x < 0, waves, fall) / (math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(size)))
    # the power series about 0: two solutions of y'' = x y, weighted by Ai(0) and Ai'(0)
    cube = jnp.clip(x, -2.09, 2.09) ** 3
    near = 0.35502805388781724 * _polynomial(cube, _AIRY_SERIES[0])
    near = near - 0.2588194037928068 * x * _polynomial(cube, _AIRY_SERIES[1])
    value = jnp.where((x >= -2.09) & (x < 2.09), near, far)
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.where(x > 103.892, 0, value))


ops.table(
    INT_TO_FLOAT,
    {
        "aten::i0": _i0,
        "aten::special_airy_ai": _airy_ai,
        "aten::special_bessel_j0": lambda x: _bessel_j(x, 0),
        "aten::special_bessel_j1": lambda x: _bessel_j(x, 1),
        "aten::special_bessel_y0": lambda x: _bessel_y(x, 0),
        "aten::special_bessel_y1": lambda x: _bessel_y(x, 1),
        "aten::special_i0e": _i0e,
        "aten::special_i1": _i1,
        "aten::special_i1e": lax.bessel_i1e,
        "aten::special_modified_bessel_i0": _i0,
        "aten::special_modified_bessel_i1": _i1,
        "aten::special_modified_bessel_k0": lambda x: _bessel_k(x, 0, scaled=False),
        "aten::special_modified_bessel_k1": lambda x: _bessel_k(x, 1, scaled=False),
        "aten::special_scaled_modified_bessel_k0": lambda x: _bessel_k(x, 0, scaled=True),
        "aten::special_scaled_modified_bessel_k1": lambda x: _bessel_k(x, 1, scaled=True),
        "aten::special_spherical_bessel_j0": _spherical_j0,
    },
)


# -- orthogonal polynomials ------------------------------------------------------------------------

Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Polynomial = Callable[[jax.Array, jax.Array], jax.Array]


def _degree(n: jax.Array) -> jax.Array:
    """`n` without its fraction; what is no number at all counts as negative."""
    return jnp.where(jnp.isfinite(n), jnp.trunc(n), -1)


_STEPS_AT_ONCE = 4
"""Steps of a recurrence from one look at what is left to do to the next: XLA takes them in one pass over memory."""


def _recurrence(n: jax.Array, first: jax.Array, step: Step) -> jax.Array:
    """The polynomial of degree `n`, element by element: p[0] = 1, p[1] = first, p[k + 1] = step(k, p[k], p[k - 1]).

    As many steps as the highest degree asks for; 0 where `n` is negative.
    """

    def advance(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, before, now = state
        for _ in range(_STEPS_AT_ONCE):
            before, now, k = now, jnp.where(n > k, step(k, now, before), now), k + 1
        return k, before, now

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        k, _, now = state
        return jnp.any((n > k) & ~jnp.isnan(now))

    start = (jnp.ones((), first.dtype), jnp.ones_like(first), first)
    _, _, last = lax.while_loop(unfinished, advance, start)
    return jnp.where(n < 0, 0, jnp.where(n < 1, 1, last))


def _chebyshev(first: Callable[[jax.Array], jax.Array], closed: Polynomial, shifted: bool) -> Polynomial:
    """One of the four kinds: they differ in p[1] and in the trigonometric form that they have inside (-1, 1).

    closed: that form, of the arc cosine and the degree; exact for high degrees as the recurrence is not.
    """

    def polynomial(x: jax.Array, n: jax.Array) -> jax.Array:
        x, n = jnp.broadcast_arrays(2 * x - 1 if shifted else x, _degree(n))
        inside = (jnp.abs(x) < 1) & (n > 6)
        outside = _recurrence(jnp.where(inside, 0, n), first(x), lambda k, now, before: 2 * x * now - before)
        return jnp.where(inside, closed(jnp.arccos(x), n), outside)

    return polynomial


def _hermite(first: Callable[[jax.Array], jax.Array], step: Callable[[jax.Array], Step]) -> Polynomial:
    """Of degrees up to a limit that torch sets by dtype; NaN beyond."""

    def polynomial(x: jax.Array, n: jax.Array) -> jax.Array:
        x, n = jnp.broadcast_arrays(x, _degree(n))
        beyond = n > (512 if x.dtype == jnp.float64 else 128)
        return jnp.where(beyond, jnp.nan, _recurrence(jnp.where(beyond, 0, n), first(x), step(x)))

    return polynomial


def _laguerre(x: jax.Array, n: jax.Array) -> jax.Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))
    return _recurrence(n, 1 - x, lambda k, now, before: ((2 * k + 1 - x) * now - k * before) / (k + 1))


def _legendre(x: jax.Array, n: jax.Array) -> jax.Array:
    x, n = jnp.broadcast_arrays(x, _degree(n))
    return _recurrence(n, x, lambda k, now, before: ((2 * k + 1) * x * now - k * before) / (k + 1))


_KINDS: dict[str, tuple[Callable[[jax.Array], jax.Array], Polynomial]] = {
    "t": (lambda x: x, lambda angle, n: jnp.cos(n * angle)),
    "u": (lambda x: 2 * x, lambda angle, n: jnp.sin((n + 1) * angle) / jnp.sin(angle)),
    "v": (lambda x: 2 * x - 1, lambda angle, n: jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)),
    "w": (lambda x: 2 * x + 1, lambda angle, n: jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)),
}
_POLYNOMIALS: dict[str, Polynomial] = {
    **{f"chebyshev_polynomial_{kind}": _chebyshev(*parts, shifted=False) for kind, parts in _KINDS.items()},
    **{f"shifted_chebyshev_polynomial_{kind}": _chebyshev(*parts, shifted=True) for kind, parts in _KINDS.items()},
    "hermite_polynomial_h": _hermite(lambda x: 2 * x, lambda x: lambda k, now, before: 2 * (x * now - k * before)),
    "hermite_polynomial_he": _hermite(lambda x: x, lambda x: lambda k, now, before: x * now - k * before),
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
}
ops.table(
    INT_TO_FLOAT,
    {
        f"aten::special_{name}{overload}": polynomial
        for name, polynomial in _POLYNOMIALS.items()
        for overload in ("", ".n_scalar", ".x_scalar")
    },
)
