"""Random numbers: rand, normal, bernoulli, multinomial, dropout and the other distributions.

Every op asks for a `key`, which the environment splits from its own or takes from the call's torch.Generator, and the
same key gives the same numbers, eager or compiled. Only the distributions are torch's; the numbers are JAX's.
The functional twins are registered (`normal_functional`, `uniform`, `bernoulli.p`, ...); `normal_` and the like follow.
Half types draw on their own grid where an end of the range is excluded, since rounding from float32 could reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax_core.dtypes import torch_dtype, type_name
from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten.reductions import argmax

ops = OpSet("torchax_ops_aten.random")


def _default_float() -> np.dtype:
    """torch's default float type, which a factory without `dtype` makes."""
    return jnp.dtype(str(torch.get_default_dtype()).removeprefix("torch."))


def _compute_dtype(dtype: Any) -> np.dtype:
    """The float type to compute a distribution in, for results of `dtype`: integers and half types take float32."""
    return jnp.dtype(jnp.float64) if jnp.dtype(dtype) == jnp.float64 else jnp.dtype(jnp.float32)


def _bits64(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Random 64-bit words, put together from 32-bit ones.

    JAX would make them when it lowers the program, which is when a user's own jax.jit has 64-bit types switched off.
    """
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32).astype(jnp.uint64)
    return (high << 32) | low


def _uniform(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """[0, 1) on the grid of `dtype`; for a complex one, in both parts."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*_uniform(key, (2, *shape), np.empty(0, dtype).real.dtype))
    if dtype == jnp.float64:
        return (_bits64(key, shape) >> 11).astype(dtype) * 2.0**-53
    return jax.random.uniform(key, shape, dtype)


def _open_uniform(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """(0, 1), both ends excluded, so that logarithms are finite: the middles of steps of `eps`, float32 or float64."""
    if dtype == jnp.float64:
        return (_bits64(key, shape) >> 12).astype(dtype) * 2.0**-52 + 2.0**-53
    return jax.random.uniform(key, shape, dtype) + jnp.finfo(dtype).eps / 2


def _exponential(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The exponential distribution of rate 1, never 0: `-log(q)` of it must be finite (gumbel_softmax)."""
    return -jnp.log1p(-_open_uniform(key, shape, dtype))


def _normal(key: jax.Array, shape: Sequence[int], dtype: Any, mean: Any = 0, std: Any = 1) -> jax.Array:
    """`mean + std * N(0, 1)`, computed in float32 for half types. A complex one has variance `std ** 2` in all."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _normal(key, (2, *shape), np.empty(0, dtype).real.dtype) * np.sqrt(0.5, dtype=dtype).real
        draw = lax.complex(*parts)
    elif dtype == jnp.float64:
        draw = math.sqrt(2) * lax.erf_inv(2 * _open_uniform(key, shape, dtype) - 1)
    else:
        draw = jax.random.normal(key, shape, jnp.float32)
    return draw * std + mean


def _bernoulli(key: jax.Array, p: jax.Array, shape: Sequence[int]) -> jax.Array:
    """True with probability `p`, float32 or float64."""
    return _uniform(key, shape, p.dtype) < p


def _integers(key: jax.Array, shape: Sequence[int], low: int, high: int) -> jax.Array:
    """Integers in [low, high), of any width up to 2**64, as int32 or int64."""
    if -(2**31) <= low and high < 2**31:
        return jax.random.randint(key, shape, low, high, jnp.int32)
    bits = _bits64(key, shape)
    if high - low < 2**64:
        bits = bits % np.uint64(high - low)
    return lax.bitcast_convert_type(bits, jnp.int64) + low  # wraps, as two's complement should


# -- factories ------------------------------------------------------------------------------------


@ops.lowering("aten::rand", "aten::rand.generator")
def rand(size, *, dtype=None, key):
    """Uniform on [0, 1). `size` () and up; `dtype` float or complex, the default float type if None."""
    return _uniform(key, size, dtype or _default_float())


@ops.lowering("aten::rand_like", "aten::rand_like.generator")
def rand_like(self, *, dtype=None, key):
    """Uniform on [0, 1) in the shape of `self`."""
    return _uniform(key, self.shape, dtype or self.dtype)


@ops.lowering("aten::randn", "aten::randn.generator")
def randn(size, *, dtype=None, key):
    """Normal of mean 0 and variance 1; a complex one has variance 1/2 in each part."""
    return _normal(key, size, dtype or _default_float())


@ops.lowering("aten::randn_like", "aten::randn_like.generator")
def randn_like(self, *, dtype=None, key):
    """Normal of mean 0 and variance 1 in the shape of `self`."""
    return _normal(key, self.shape, dtype or self.dtype)


@ops.lowering("aten::randint", "aten::randint.generator")
def randint(high, size, *, dtype=None, key):
    """Integers in [0, high), int64 unless `dtype` says otherwise (float types hold integers)."""
    return _integers(key, size, 0, high)


@ops.lowering("aten::randint.low", "aten::randint.low_generator")
def randint_low(low, high, size, *, dtype=None, key):
    """Integers in [low, high)."""
    return _integers(key, size, low, high)


@ops.lowering("aten::randint_like", "aten::randint_like.generator")
def randint_like(self, high, *, dtype=None, key):
    """Integers in [0, high) in the shape and dtype of `self`."""
    return _integers(key, self.shape, 0, high)


@ops.lowering("aten::randint_like.low_dtype", "aten::randint_like.low_generator_dtype")
def randint_like_low(self, low, high, *, dtype=None, key):
    """Integers in [low, high) in the shape and dtype of `self`."""
    return _integers(key, self.shape, low, high)


@ops.lowering("aten::randint_like.Tensor", "aten::randint_like.Tensor_generator")
def randint_like_tensor(self, high, *, dtype=None, key):
    """Integers in [0, high) in the shape and dtype of `self`; `high` has one element."""
    bits = _bits64(key, self.shape) % high.reshape(()).astype(jnp.uint64)
    return bits.astype(jnp.int64)


@ops.lowering("aten::randperm", "aten::randperm.generator")
def randperm(n, *, dtype=None, key):
    """A permutation of 0..n-1."""
    if n > 2**20:
        return jax.random.permutation(key, jnp.arange(n))
    # Each position below a random number in one word: a single sort of single words, some times faster than JAX's. The
    # 44 random bits or more hardly ever meet.
    width = np.uint64(max(n - 1, 1).bit_length())
    words = lax.sort((_bits64(key, (n,)) << width) | jnp.arange(n, dtype=jnp.uint64), is_stable=False)
    return (words & ((np.uint64(1) << width) - np.uint64(1))).astype(jnp.int64)


@ops.lowering("aten::normal.float_float")
def normal_float_float(mean, std, size, *, dtype=None, key):
    """Normal of mean `mean` and standard deviation `std`, of shape `size`."""
    return _normal(key, size, dtype or _default_float(), mean, std)


@ops.lowering("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def normal(mean, std=1.0, *, key):
    """Normal, one draw per element of `mean` and `std` broadcast, in the dtype of the tensor (of `mean` if both)."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = jnp.result_type(mean) if jnp.ndim(mean) or not jnp.ndim(std) else jnp.result_type(std)
    return _normal(key, shape, dtype, mean, std)


@ops.value_check("aten::normal.float_Tensor", "aten::normal.Tensor_Tensor", values=("std",))
def _normal_refused(std):
    return bool(np.any(std < 0))


# -- fills: the functional twins of normal_, uniform_, ... ------------------------------------------


@ops.lowering("aten::normal_functional")
def normal_functional(self, mean=0.0, std=1.0, *, key):
    """Normal of mean `mean` and standard deviation `std` in the shape and dtype of `self`."""
    return _normal(key, self.shape, self.dtype, mean, std)


@ops.lowering("aten::uniform")
def uniform(self, to=1.0, *, key, **arguments):
    """Uniform on [from, to) in the shape and dtype of `self`."""
    low = arguments.get("from", 0.0)  # no name for a Python parameter
    return opmath(_uniform(key, self.shape, self.dtype)) * (to - low) + low


@ops.value_check("aten::uniform", values=())
def _uniform_refused(to=1.0, **arguments):
    return not arguments.get("from", 0.0) <= to


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


@ops.lowering("aten::log_normal", static=("std",))
def log_normal(self, mean=1.0, std=2.0, *, key):
    """exp of a normal of mean `mean` and standard deviation `std`, greater than 0."""
    _require(std > 0, f"log_normal_ expects std > 0.0, but found std={std:g}")
    return jnp.exp(_normal(key, self.shape, self.dtype, mean, std))


@ops.lowering("aten::exponential", static=("lambd",))
def exponential(self, lambd=1.0, *, key):
    """The exponential distribution of rate `lambd`, greater than 0; draws are too."""
    _require(lambd > 0, f"exponential_ expects lambda > 0.0, but found lambda={lambd:g}")
    return _exponential(key, self.shape, _compute_dtype(self.dtype)) / lambd


@ops.lowering("aten::cauchy", static=("sigma",))
def cauchy(self, median=0.0, sigma=1.0, *, key):
    """The Cauchy distribution about `median`, of width `sigma`, greater than 0."""
    _require(sigma > 0, f"cauchy_ expects sigma > 0.0, but found sigma={sigma:g}")
    return median + sigma * jnp.tan(jnp.pi * (_open_uniform(key, self.shape, _compute_dtype(self.dtype)) - 0.5))


@ops.lowering("aten::geometric", static=("p",))
def geometric(self, p, *, key):
    """Trials up to and with the first success, each of probability `p` in (0, 1): 1, 2, ..."""
    _require(0 < p < 1, f"geometric_ expects p to be in (0, 1), but got p={p:g}")
    u = _open_uniform(key, self.shape, _compute_dtype(self.dtype))
    return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-p)), 1)


def _random_end(dtype: Any) -> int:
    """One more than the largest integer that `random` gives: all integers below it are exact in `dtype`."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return 2
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max) + 1
    return 2 ** (jnp.finfo(dtype).nmant + 1) + 1


@ops.lowering("aten::random")
def random(self, *, key):
    """Integers from 0 to the largest of an integer dtype, or to 2**(mantissa bits) of a float one."""
    return _integers(key, self.shape, 0, _random_end(self.dtype))


@ops.lowering("aten::random.to")
def random_to(self, to, *, key):
    """Integers in [0, to)."""
    return _integers(key, self.shape, 0, to)


@ops.lowering("aten::random.from")
def random_from(self, to, *, key, **arguments):
    """Integers in [from, to); up to the largest that `random` gives if `to` is None."""
    return _integers(key, self.shape, arguments["from"], _random_end(self.dtype) if to is None else to)


# -- distributions of a tensor of parameters ---------------------------------------------------------


@ops.lowering("aten::bernoulli")
def bernoulli(self, *, key):
    """0 or 1, 1 with the probability that `self` holds for each element; shape and dtype of `self`."""
    return _bernoulli(key, opmath(self), self.shape).astype(self.dtype)


@ops.lowering("aten::bernoulli.p", "aten::bernoulli.Tensor")
def bernoulli_p(self, p=0.5, *, key):
    """0 or 1 in the shape and dtype of `self`, 1 with probability `p` in [0, 1], which broadcasts to `self`."""
    p = opmath(jnp.asarray(p))
    # A probability in float64 is worth the wider draw only to a float64 tensor.
    p = p if self.dtype == jnp.float64 else p.astype(jnp.float32)
    return _bernoulli(key, p, self.shape).astype(self.dtype)


def _no_probability(p: Any) -> bool:
    """Whether something is not in [0, 1]; NaN is not."""
    return not bool(np.all((p >= 0) & (p <= 1)))


@ops.value_check("aten::bernoulli", values=("self",))
def _bernoulli_refused(self):
    return _no_probability(self)


@ops.value_check("aten::bernoulli.p", "aten::bernoulli.Tensor", values=("p",))
def _bernoulli_p_refused(p=0.5):
    return _no_probability(p)


@ops.lowering("aten::multinomial")
def multinomial(self, num_samples, replacement=False, *, key):
    """Indices drawn with the weights that each row of `self` holds.

    self:    (n,) or (m, n), float; weights that need not add up to 1.
    returns: (num_samples,) or (m, num_samples), int64. Weight 0 is not drawn, unless a row has fewer others than
             `num_samples` and may not repeat them.
    """
    if not jnp.issubdtype(self.dtype, jnp.floating):
        name = type_name(torch_dtype(self.dtype))
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {name}")
    _require(num_samples > 0, "cannot sample n_sample <= 0 samples")
    _require(self.shape[-1] <= 2**24, "number of categories cannot exceed 2^24")
    enough = replacement or num_samples <= self.shape[-1]
    _require(enough, "cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    weights = self.astype(_compute_dtype(self.dtype))
    if not replacement or num_samples == 1:
        # The smallest exponential variables of rates `weights` are a draw without replacement, in order.
        score = jnp.log(weights) - jnp.log(_exponential(key, weights.shape, weights.dtype))
        if num_samples == 1:
            return argmax(score, -1, keepdim=True)
        return lax.top_k(score, num_samples)[1].astype(jnp.int64)
    # A parallel sum may round weights of 0 into small steps, which could be drawn: only others make steps.
    ends = lax.cummax(jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0), axis=weights.ndim - 1)
    total = ends[..., -1:]
    u = _uniform(key, (*weights.shape[:-1], num_samples), weights.dtype) * total
    u = jnp.minimum(u, jnp.nextafter(total, jnp.zeros_like(total)))
    search = jnp.vectorize(lambda row, at: jnp.searchsorted(row, at, side="right"), signature="(n),(k)->(k)")
    return search(ends, u).astype(jnp.int64)


@ops.value_check("aten::multinomial", values=("self",))
def _multinomial_refused(self):
    """Whether weights are negative, infinite or NaN, or those of a row are all 0."""
    return not bool(np.all(np.isfinite(self) & (self >= 0)) and np.all(np.any(self, axis=-1)))


def _threefry(key: jax.Array) -> jax.Array:
    """The key as a threefry one, which is all that jax.random.poisson takes."""
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def _log_gamma(key: jax.Array, shape_parameter: jax.Array) -> jax.Array:
    """Logarithms of draws of the gamma distribution, in float32: JAX lowers wider ones only with 64-bit types on."""
    return jax.random.loggamma(key, shape_parameter.astype(jnp.float32), shape_parameter.shape, jnp.float32)


@ops.lowering("aten::poisson")
def poisson(self, *, key):
    """Counts of the Poisson distribution of rate `self`, in its shape and dtype."""
    return jax.random.poisson(_threefry(key), self.astype(jnp.float32), self.shape, jnp.int64)


@ops.value_check("aten::poisson", values=("self",))
def _poisson_refused(self):
    return bool(np.any(self < 0))


@ops.lowering("aten::binomial")
def binomial(count, prob, *, key):
    """Successes of `count` trials of probability `prob`, broadcast; dtype of `count`. Less than 0 trials have none."""
    shape = jnp.broadcast_shapes(count.shape, prob.shape)
    trials = jnp.maximum(count, 0).astype(jnp.float32)
    return jax.random.binomial(key, trials, prob.astype(jnp.float32), shape, jnp.float32).astype(count.dtype)


@ops.lowering("aten::_standard_gamma")
def _standard_gamma(self, *, key):
    """The gamma distribution of shape parameter `self` and rate 1; greater than 0.

    Drawn by its logarithm, in which small ones do not vanish.
    """
    draw = jnp.exp(_log_gamma(key, self).astype(opmath(self).dtype))
    return jnp.maximum(draw, jnp.finfo(self.dtype).tiny)


@ops.lowering("aten::_standard_gamma_grad")
def _standard_gamma_grad(self, output):
    """The derivative of a gamma draw `output` by its shape parameter `self` (implicit reparametrization)."""
    return lax.random_gamma_grad(opmath(self), opmath(output)).astype(self.dtype)


@ops.lowering("aten::_sample_dirichlet")
def _sample_dirichlet(self, *, key):
    """The Dirichlet distribution. self: (..., n) concentrations. returns: (..., n), the last axis adds up to 1."""
    return jax.nn.softmax(_log_gamma(key, self).astype(opmath(self).dtype), axis=-1).astype(self.dtype)


@ops.lowering("aten::_dirichlet_grad")
def _dirichlet_grad(x, alpha, total):
    """The derivative of a Beta(alpha, total - alpha) draw `x` by `alpha`, over `1 - x`, for Dirichlet's gradient.

    The draw moves with the parameter by `-(dF/dalpha) / f`, F the distribution function and f the density (implicit
    reparametrization, https://arxiv.org/abs/1805.08498). With psi the digamma function,

        dF/dalpha = integral of f(t) (log t - psi(alpha) + psi(total)) dt over [0, x], or minus that over [x, 1];

    the tail on x's side of the mean is taken. In y = log(x / t), or log((1 - x) / (1 - t)), it is smooth and decays,
    and a double exponential rule of 80 points gives it to 1e-8, in float64, for parameters up to some hundreds.
    """
    dtype = x.dtype
    x, alpha, total = (opmath(v)[..., None] for v in (x, alpha, total))
    beta = total - alpha
    left = x * total < alpha
    end = jnp.where(left, x, 1 - x)
    p, q = jnp.where(left, alpha, beta), jnp.where(left, beta, alpha)
    u = np.linspace(-4, 4, 80)
    y = jnp.asarray(np.exp(u - np.exp(-u)), x.dtype) * jnp.maximum(1 / p, 1 / jnp.sqrt(p))
    weight = y * jnp.asarray((1 + np.exp(-u)) * (u[1] - u[0]), x.dtype)
    other = jnp.log1p(-end * jnp.exp(-y))
    density = jnp.exp(-p * y + (q - 1) * (other - jnp.log1p(-end)))
    mean_log = lax.digamma(alpha) - lax.digamma(total)
    score = jnp.where(left, mean_log - jnp.log(x) + y, other - mean_log)
    return (end / (1 - x) * (density * score * weight).sum(axis=-1, keepdims=True))[..., 0].astype(dtype)


# -- dropout --------------------------------------------------------------------------------------


@ops.lowering("aten::native_dropout")
def native_dropout(input, p, train=True, *, key):
    """`input` with each element zeroed with probability `p` and the others divided by `1 - p`; the mask of those kept.

    returns: `input`'s shape and dtype, and bool. Nothing is dropped if `train` is False.
    """
    if train is False:
        return input, jnp.ones(input.shape, bool)
    keep = 1 - jnp.asarray(p, jnp.float32)
    # Without the barrier XLA may draw the numbers once for each result.
    mask = lax.optimization_barrier(_bernoulli(key, keep, input.shape))
    scale = jnp.where(keep == 0, 0, 1 / jnp.where(keep == 0, 1, keep))
    return jnp.where(mask, opmath(input) * scale, 0), mask


@ops.lowering("aten::native_dropout_backward")
def native_dropout_backward(grad_output, mask, scale):
    """`grad_output` where `mask`, times `scale`, which the forward divided by."""
    return jnp.where(mask, opmath(grad_output) * scale, 0)
