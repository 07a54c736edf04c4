"""What an optimizer step is made of: `_foreach_*` ops over lists of tensors, whole fused steps, and loss scaling.

torch's own fallback for these is a Python-like loop over single ops; here each call is one program over the whole list.
The `_foreach_*` ops come from tables of elementwise functions: `_foreach_f(xs, ys)` is `[f(x, y) for x, y in
zip(xs, ys)]`. Dtypes are promoted pair by pair, so the elements of one list may differ in shape and dtype.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import elementwise_dtypes

from torchax_core.dtypes import jax_dtype, torch_dtype
from torchax_core.opset import OpSet
from torchax_core.promotion import AS_GIVEN, COMPLEX_TO_FLOAT, INT_TO_FLOAT, SAME, Promotion, opmath
from torchax_ops_aten.copying import cast
from torchax_ops_aten.matmul import precision_for
from torchax_ops_aten.reductions import refuse_empty

ops = OpSet("torchax_ops_aten.optim", depends_on=torch.get_float32_matmul_precision)

Elementwise = Callable[..., jax.Array]
Scalar: TypeAlias = Any
"""A jax array or a Python number: what stands for a schema Scalar."""


# -- promotion of one element of the lists -----------------------------------------------------------------------------

_NUMBER_OF_KIND = {"b": True, "i": 1, "u": 1, "f": 1.0, "c": 1j}


@functools.cache
def _compute_dtype(rule: Promotion, tensors: tuple[tuple[np.dtype, bool], ...], kinds: tuple[str, ...]) -> np.dtype:
    """The dtype to compute in: `tensors` are (dtype, is 0-d) pairs, `kinds` the numpy kinds of the Scalars."""
    stand_ins = [
        torch.empty(() if is_0d else (0,), dtype=torch_dtype(dtype), device="meta") for dtype, is_0d in tensors
    ]
    numbers = [_NUMBER_OF_KIND[kind] for kind in kinds]
    return jax_dtype(elementwise_dtypes(*stand_ins, *numbers, type_promotion_kind=rule.kind)[0])


def _promote(rule: Promotion, tensors: Sequence[jax.Array], scalars: Sequence[Scalar] = ()) -> list[jax.Array]:
    """`tensors` and then `scalars`, all in the dtype torch computes their elementwise op in.

    A Scalar counts as torch's "wrapped number": it lifts the category (an int tensor times 0.5 is a float), never the
    width within one.
    """
    dtype = _compute_dtype(
        rule,
        tuple((np.dtype(x.dtype), x.ndim == 0) for x in tensors),
        tuple(np.result_type(s).kind for s in scalars),
    )
    return [jnp.asarray(x).astype(dtype) for x in (*tensors, *scalars)]


# -- elementwise functions that are not one JAX call -------------------------------------------------------------------


def _lerp(start: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    """`start` at weight 0, `end` at 1: exact at both ends, as torch computes it."""
    near_start = jnp.abs(weight) < 0.5
    return jnp.where(near_start, start + weight * (end - start), end - (end - start) * (1 - weight))


def _frac(x: jax.Array) -> jax.Array:
    return x - jnp.trunc(x)


def _reciprocal(x: jax.Array) -> jax.Array:
    return 1 / x


def _rsqrt(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(x) if jnp.isrealobj(x) else 1 / jnp.sqrt(x)


def _pow(base: jax.Array, exponent: Any) -> jax.Array:
    """`base ** exponent`; integers to a negative power are 0, except for bases 1 and -1."""
    if not jnp.issubdtype(base.dtype, jnp.signedinteger):
        return jnp.power(base, exponent)
    power = jnp.power(base, jnp.maximum(exponent, 0))
    to_negative = jnp.where(base == 1, 1, jnp.where(base == -1, 1 - 2 * (exponent & 1), 0))
    return jnp.where(exponent < 0, to_negative, power).astype(base.dtype)


def _whole(round_: Elementwise) -> Elementwise:
    """`round_` for floats; integers are whole already."""
    return lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else round_(x)


# -- the tables --------------------------------------------------------------------------------------------------------

UNARY: dict[str, tuple[Promotion, Elementwise]] = {
    "abs": (COMPLEX_TO_FLOAT, jnp.abs),
    "acos": (INT_TO_FLOAT, jnp.arccos),
    "asin": (INT_TO_FLOAT, jnp.arcsin),
    "atan": (INT_TO_FLOAT, jnp.arctan),
    "ceil": (SAME, _whole(jnp.ceil)),
    "cos": (INT_TO_FLOAT, jnp.cos),
    "cosh": (INT_TO_FLOAT, jnp.cosh),
    "erf": (INT_TO_FLOAT, jax.lax.erf),
    "erfc": (INT_TO_FLOAT, jax.lax.erfc),
    "exp": (INT_TO_FLOAT, jnp.exp),
    "expm1": (INT_TO_FLOAT, jnp.expm1),
    "floor": (SAME, _whole(jnp.floor)),
    "frac": (SAME, _frac),
    "lgamma": (INT_TO_FLOAT, jax.lax.lgamma),
    "log": (INT_TO_FLOAT, jnp.log),
    "log10": (INT_TO_FLOAT, jnp.log10),
    "log1p": (INT_TO_FLOAT, jnp.log1p),
    "log2": (INT_TO_FLOAT, jnp.log2),
    "neg": (SAME, operator.neg),
    "reciprocal": (INT_TO_FLOAT, _reciprocal),
    "round": (SAME, _whole(jnp.round)),
    "rsqrt": (INT_TO_FLOAT, _rsqrt),
    "sigmoid": (INT_TO_FLOAT, jax.nn.sigmoid),
    "sign": (SAME, lambda x: x if x.dtype == bool else jnp.sign(x)),
    "sin": (INT_TO_FLOAT, jnp.sin),
    "sinh": (INT_TO_FLOAT, jnp.sinh),
    "sqrt": (INT_TO_FLOAT, jnp.sqrt),
    "tan": (INT_TO_FLOAT, jnp.tan),
    "tanh": (INT_TO_FLOAT, jnp.tanh),
    "trunc": (SAME, _whole(jnp.trunc)),
}
"""`aten::_foreach_<name>(Tensor[] self)`."""

BINARY: dict[str, tuple[Promotion, Elementwise]] = {
    "add": (SAME, operator.add),
    "sub": (SAME, operator.sub),
    "mul": (SAME, operator.mul),
    "div": (INT_TO_FLOAT, operator.truediv),
    "clamp_max": (SAME, jnp.minimum),
    "clamp_min": (SAME, jnp.maximum),
    "maximum": (SAME, jnp.maximum),
    "minimum": (SAME, jnp.minimum),
}
"""`aten::_foreach_<name>` with a second operand: `.List`, `.ScalarList` one each; `.Scalar`, `.Tensor` one for all."""

WITH_ALPHA = ("add", "sub")
"""The binary ops whose tensor overloads scale the second operand by `alpha` first."""
WITH_TENSOR_OVERLOAD = ("add", "mul", "div")

POINTWISE: dict[str, tuple[Promotion, Elementwise]] = {
    "addcmul": (SAME, lambda x, a, b, value: x + value * a * b),
    "addcdiv": (SAME, lambda x, a, b, value: x + value * (a / b)),
}
"""`aten::_foreach_<name>(self, tensor1, tensor2, value)`; `value` is cast to the common dtype and does not lift it."""


def _each(f: Callable[..., jax.Array], *columns: Sequence[Any]) -> list[jax.Array]:
    """`f` of each row of the columns; once for rows of the very same values, as the step counts of a program are."""
    rows = [*zip(*columns, strict=True)]
    keys = [(*map(id, row),) for row in rows]
    made = {key: f(*row) for key, row in dict(zip(keys, rows, strict=True)).items()}
    return [made[key] for key in keys]


def _unary(rule: Promotion, f: Elementwise) -> Elementwise:
    def body(self):
        return _each(lambda x: f(*_promote(rule, [x])), self)

    return body


def _with_list(rule: Promotion, f: Elementwise) -> Elementwise:
    def body(self, other):
        return _each(lambda *pair: f(*_promote(rule, pair)), self, other)

    return body


def _with_scaled_list(rule: Promotion, f: Elementwise) -> Elementwise:
    def body(self, other, *, alpha=1):
        def scaled(*pair: jax.Array) -> jax.Array:
            x, y = _promote(rule, pair)
            return f(x, y * jnp.asarray(alpha, y.dtype))

        return _each(scaled, self, other)

    return body


def _with_tensor(rule: Promotion, f: Elementwise) -> Elementwise:
    body = _with_list(rule, f)
    return lambda self, other: body(self, [other] * len(self))


def _with_scaled_tensor(rule: Promotion, f: Elementwise) -> Elementwise:
    body = _with_scaled_list(rule, f)
    return lambda self, other, *, alpha=1: body(self, [other] * len(self), alpha=alpha)


def _with_scalar(rule: Promotion, f: Elementwise) -> Elementwise:
    def body(self, scalar):
        return _each(lambda x: f(*_promote(rule, [x], [scalar])), self)

    return body


def _with_scalars(rule: Promotion, f: Elementwise) -> Elementwise:
    def body(self, scalars):
        return _each(lambda x, s: f(*_promote(rule, [x], [s])), self, scalars)

    return body


def _pointwise(rule: Promotion, f: Elementwise) -> Callable[..., list[jax.Array]]:
    def compute(self, tensor1, tensor2, values):
        rows = [_promote(rule, row) for row in zip(self, tensor1, tensor2, strict=True)]
        return [f(*row, jnp.asarray(value).astype(row[0].dtype)) for row, value in zip(rows, values, strict=True)]

    return compute


def _pointwise_with_scalar(rule: Promotion, f: Elementwise) -> Elementwise:
    compute = _pointwise(rule, f)

    def body(self, tensor1, tensor2, value=1):
        return compute(self, tensor1, tensor2, [value] * len(self))

    return body


def _pointwise_with_scalars(rule: Promotion, f: Elementwise) -> Elementwise:
    compute = _pointwise(rule, f)

    def body(self, tensor1, tensor2, scalars):
        return compute(self, tensor1, tensor2, [scalars[i] for i in range(len(self))])

    return body


def _register_tables() -> None:
    for name, (rule, f) in UNARY.items():
        ops.lowering(f"aten::_foreach_{name}")(_unary(rule, f))
    for name, (rule, f) in BINARY.items():
        op = f"aten::_foreach_{name}"
        ops.lowering(f"{op}.List", promote=AS_GIVEN)((_with_scaled_list if name in WITH_ALPHA else _with_list)(rule, f))
        ops.lowering(f"{op}.Scalar", promote=AS_GIVEN)(_with_scalar(rule, f))
        ops.lowering(f"{op}.ScalarList", promote=AS_GIVEN)(_with_scalars(rule, f))
        if name in WITH_TENSOR_OVERLOAD:
            ops.lowering(f"{op}.Tensor", promote=AS_GIVEN)(
                (_with_scaled_tensor if name in WITH_ALPHA else _with_tensor)(rule, f)
            )
    for name, (rule, f) in POINTWISE.items():
        op = f"aten::_foreach_{name}"
        ops.lowering(f"{op}.Scalar", promote=AS_GIVEN)(_pointwise_with_scalar(rule, f))
        ops.lowering(f"{op}.ScalarList", f"{op}.Tensor", promote=AS_GIVEN)(_pointwise_with_scalars(rule, f))


_register_tables()


# -- foreach ops with arguments of their own ---------------------------------------------------------------------------


@ops.lowering("aten::_foreach_pow.List")
def foreach_pow_list(self, exponent):
    return _each(lambda *pair: _pow(*_promote(SAME, pair)), self, exponent)


@ops.lowering("aten::_foreach_pow.Scalar", static=("exponent",))
def foreach_pow_scalar(self, exponent):
    """`exponent` is static: XLA turns the usual ones (2, 0.5, -1) into a product, a root, a quotient."""
    return _each(lambda x: _pow_of_number(x, exponent), self)


@ops.lowering("aten::_foreach_pow.ScalarList", promote=AS_GIVEN)
def foreach_pow_scalars(self, exponent):
    return _each(lambda x, e: _pow(*_promote(SAME, [x], [e])), self, exponent)


@ops.lowering("aten::_foreach_pow.ScalarAndTensor", promote=AS_GIVEN)
def foreach_pow_of_scalar(self, exponent):
    """The number `self` to the power of each tensor."""
    return _each(lambda e: _pow(*reversed(_promote(SAME, [e], [self]))), exponent)


def _pow_of_number(x: jax.Array, exponent: complex) -> jax.Array:
    (x, _) = _promote(SAME, [x], [exponent])
    if x.dtype == bool:
        return x | (not exponent)
    return jnp.power(x, exponent).astype(x.dtype)


@ops.lowering("aten::_foreach_lerp.List")
def foreach_lerp_list(self, tensors1, weights):
    return _each(lambda *row: _lerp(*map(opmath, row)), self, tensors1, weights)


@ops.lowering("aten::_foreach_lerp.Scalar", promote=AS_GIVEN)
def foreach_lerp_scalar(self, tensors1, weight):
    return _lerp_each(self, tensors1, [weight] * len(self))


@ops.lowering("aten::_foreach_lerp.ScalarList", promote=AS_GIVEN)
def foreach_lerp_scalars(self, tensors1, weight):
    return _lerp_each(self, tensors1, weight)


def _lerp_each(starts: list[jax.Array], ends: list[jax.Array], weights: Sequence[Scalar]) -> list[jax.Array]:
    rows = zip(map(opmath, starts), map(opmath, ends), weights, strict=True)
    return [_lerp(start, end, jnp.asarray(weight).astype(start.dtype)) for start, end, weight in rows]


@ops.lowering("aten::_foreach_norm.Scalar", static=("ord",))
def foreach_norm(self, ord=2, dtype=None):
    """The vector norm of each tensor, flattened: each of shape (), real, in `dtype` if that is given."""
    return [_vector_norm(_as(x, dtype), ord) for x in self]


@ops.lowering("aten::_foreach_powsum.Scalar", static=("ord",))
def foreach_powsum(self, ord=2, dtype=None):
    """`sum(abs(x) ** ord)` of each tensor: each of shape (), real, in `dtype` if that is given."""
    return [_powsum(_as(x, dtype), ord) for x in self]


def _as(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    return opmath(x if dtype is None else x.astype(dtype))


def _powsum(x: jax.Array, ord: float) -> jax.Array:
    if ord == 2:
        return jnp.sum(x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x * x)
    return jnp.sum(jnp.abs(x) ** ord)


def _vector_norm(x: jax.Array, ord: float) -> jax.Array:
    if x.size == 0 and ord < 0:  # torch's own error, in its words
        raise RuntimeError(
            f"linalg.vector_norm cannot compute the {ord:g} norm on an empty tensor because the operation does not have an "
            "identity"
        )
    if ord == float("inf"):
        return jnp.max(jnp.abs(x))
    if ord == float("-inf"):
        return jnp.min(jnp.abs(x))
    if ord == 0:
        return jnp.sum(x != 0).astype(x.real.dtype)
    if ord == 1:
        return jnp.sum(jnp.abs(x))
    total = _powsum(x, ord)
    return jnp.sqrt(total) if ord == 2 else total ** (1 / ord)


@ops.lowering("aten::_foreach_max")
def foreach_max(self):
    """The largest element of each tensor, NaN if it holds one: each of shape ()."""
    for x in self:
        refuse_empty("max", x)
    return [jnp.max(x) for x in self]


@ops.lowering("aten::_foreach_mm")
def foreach_mm(self, mat2):
    """`self[i] @ mat2[i]`: (m, k) times (k, n), each pair with its own sizes."""
    return [jnp.matmul(opmath(a), opmath(b), precision=precision_for(a.dtype)) for a, b in zip(self, mat2, strict=True)]


@ops.lowering("aten::_foreach_clone")
def foreach_clone(self):
    return list(self)


@ops.lowering("aten::_foreach_zero")
def foreach_zero(self):
    return [jnp.zeros_like(x) for x in self]


@ops.lowering("aten::_foreach_copy")
def foreach_copy(self, src, non_blocking=False):
    """Each `src`, broadcast to the shape and cast to the dtype of its `self`."""
    return [cast(jnp.broadcast_to(y, x.shape), x.dtype) for x, y in zip(self, src, strict=True)]


# -- fused optimizer steps ---------------------------------------------------------------------------------------------
#
# Coefficients such as 1 - beta ** step lose half of their digits in float32, so they are computed in float64, for all
# steps at once, and cast to each parameter's compute dtype in the end. Nothing changes where `found_inf` is 1.


def _wide(number: jax.Array | float) -> jax.Array:
    return jnp.asarray(number).astype(jnp.float64)


def _steps(state_steps: list[jax.Array]) -> jax.Array:
    """The step counts, each of shape () or (1,), as one float64 vector."""
    return jnp.stack(_each(lambda step: _wide(step).reshape(()), state_steps))


def _unscaled(grad: jax.Array, grad_scale: jax.Array | None) -> jax.Array:
    """`grad / grad_scale`, in the compute dtype. torch writes this back to the gradient."""
    grad = opmath(grad)
    return grad if grad_scale is None else grad / grad_scale.reshape(()).astype(grad.dtype)


def _unless(found_inf: jax.Array | None, new: list[list[jax.Array]], old: list[list[jax.Array]]) -> tuple[Any, ...]:
    """The lists `new`, in the dtypes of `old`; or, where `found_inf` is 1, the lists `old`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if found_inf is None or new is old:
            return new
        return jnp.where(found_inf.reshape(()) == 1, old, new)

    return tuple([choose(x, y) for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(new, old, strict=True))


def _adam(decoupled: bool) -> Callable[..., tuple[Any, ...]]:
    def step(
        self,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        amsgrad,
        maximize,
        grad_scale=None,
        found_inf=None,
    ):
        """One step of Adam over all parameters; of AdamW, if the weight decay is `decoupled` from the gradient.

        All lists: one tensor a parameter; `max_exp_avg_sqs` may be empty unless `amsgrad`, `state_steps` count it.
        returns:   the updated parameters, gradients (divided by `grad_scale`), and three moments.
        source:    https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
        """
        old = [self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
        if not self:
            return tuple([] for _ in old)
        lr, beta1, beta2, weight_decay = (_wide(x).reshape(()) for x in (lr, beta1, beta2, weight_decay))
        steps = _steps(state_steps)
        step_sizes = lr / (1 - beta1**steps)
        corrections = jnp.sqrt(1 - beta2**steps)

        new: list[list[jax.Array]] = [[], [], [], [], [] if amsgrad else max_exp_avg_sqs]
        for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(*old[:4], strict=True)):
            grad = unscaled = _unscaled(grad, grad_scale)
            dtype = grad.dtype
            param, exp_avg, exp_avg_sq = (x.astype(dtype) for x in (param, exp_avg, exp_avg_sq))
            if maximize:
                grad = -grad
            if decoupled:
                param = param * (1 - lr * weight_decay).astype(dtype)
            else:
                grad = grad + param * weight_decay.astype(dtype)
            exp_avg = _lerp(exp_avg, grad, (1 - beta1).astype(dtype))
            exp_avg_sq = exp_avg_sq * beta2.astype(dtype) + (1 - beta2).astype(dtype) * grad * grad
            second = exp_avg_sq
            if amsgrad:
                second = jnp.maximum(max_exp_avg_sqs[i].astype(dtype), exp_avg_sq)
                new[4].append(second)
            denominator = jnp.sqrt(second) / corrections[i].astype(dtype) + jnp.asarray(eps).astype(dtype)
            param = param - step_sizes[i].astype(dtype) * exp_avg / denominator
            for updated, value in zip(new[:4], (param, unscaled, exp_avg, exp_avg_sq), strict=True):
                updated.append(value)
        return _unless(found_inf, new, old)

    return step


ops.lowering("aten::_fused_adam", "aten::_fused_adam.tensor_lr", promote=AS_GIVEN)(_adam(decoupled=False))
ops.lowering("aten::_fused_adamw", "aten::_fused_adamw.tensor_lr", promote=AS_GIVEN)(_adam(decoupled=True))


@ops.lowering("aten::_fused_sgd", "aten::_fused_sgd.tensor_lr", promote=AS_GIVEN)
def fused_sgd(
    self,
    grads,
    momentum_buffer_list,
    *,
    weight_decay,
    momentum,
    lr,
    dampening,
    nesterov,
    maximize,
    is_first_step,
    grad_scale=None,
    found_inf=None,
):
    """One step of SGD over all parameters. Returns the updated (params, grads, momentum buffers).

    momentum_buffer_list: one buffer a parameter, or empty if there is no momentum; their content is ignored if
                          `is_first_step`.
    source: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html
    """
    new: list[list[jax.Array]] = [[], [], []]
    for i, (param, grad) in enumerate(zip(self, grads, strict=True)):
        grad = unscaled = _unscaled(grad, grad_scale)
        dtype = grad.dtype
        rate, decay, friction, damp = (
            _wide(x).reshape(()).astype(dtype) for x in (lr, weight_decay, momentum, 1 - _wide(dampening))
        )
        if maximize:
            grad = -grad
        grad = grad + param.astype(dtype) * decay
        if momentum_buffer_list:
            buffer = grad if is_first_step else momentum_buffer_list[i].astype(dtype) * friction + grad * damp
            grad = grad + buffer * friction if nesterov else buffer
            new[2].append(buffer)
        new[0].append(param.astype(dtype) - rate * grad)
        new[1].append(unscaled)
    return _unless(found_inf, new, [self, grads, momentum_buffer_list])


def _adagrad(returns_steps: bool) -> Callable[..., tuple[Any, ...]]:
    def step(
        self,
        grads,
        state_sums,
        state_steps,
        *,
        lr,
        lr_decay,
        weight_decay,
        eps,
        maximize,
        grad_scale=None,
        found_inf=None,
    ):
        """One step of Adagrad over all parameters.

        All lists: one tensor a parameter. `state_steps` counts this step.
        returns:   the updated parameters, gradients (divided by `grad_scale`) and sums; then, if the overload's schema
                   says so, the step counts as they came.
        source:    https://docs.pytorch.org/docs/stable/generated/torch.optim.Adagrad.html
        """
        new: list[list[jax.Array]] = [[], [], []]
        if self:
            rates = _wide(lr).reshape(()) / (1 + (_steps(state_steps) - 1) * _wide(lr_decay))
        for i, (param, grad, state_sum) in enumerate(zip(self, grads, state_sums, strict=True)):
            grad = unscaled = _unscaled(grad, grad_scale)
            dtype = grad.dtype
            if maximize:
                grad = -grad
            grad = grad + param.astype(dtype) * jnp.asarray(weight_decay).astype(dtype)
            state_sum = state_sum.astype(dtype) + grad * grad
            change = rates[i].astype(dtype) * grad / (jnp.sqrt(state_sum) + jnp.asarray(eps).astype(dtype))
            for updated, value in zip(new, (param.astype(dtype) - change, unscaled, state_sum), strict=True):
                updated.append(value)
        updated_lists = _unless(found_inf, new, [self, grads, state_sums])
        return (*updated_lists, state_steps) if returns_steps else updated_lists

    return step


ops.lowering("aten::_fused_adagrad", promote=AS_GIVEN)(_adagrad(returns_steps=True))
ops.lowering("aten::_fused_adagrad.tensor_lr", promote=AS_GIVEN)(_adagrad(returns_steps=False))


# -- loss scaling (torch.amp.GradScaler) -------------------------------------------------------------------------------


@ops.lowering("aten::_amp_foreach_non_finite_check_and_unscale")
def amp_foreach_non_finite_check_and_unscale(self, found_inf, inv_scale):
    """The gradients `self` times `inv_scale`, and `found_inf` or, if any gradient holds inf or NaN, 1.

    self:                 gradients of any shapes and floating dtypes.
    found_inf, inv_scale: (1,) or (), float32.
    """
    finite = [jnp.isfinite(grad).all() for grad in self]
    found = jnp.where(jnp.all(jnp.stack(finite)), found_inf, 1) if finite else found_inf
    unscaled = [(opmath(grad) * inv_scale.reshape(()).astype(opmath(grad).dtype)).astype(grad.dtype) for grad in self]
    return unscaled, found.astype(found_inf.dtype)


@ops.lowering("aten::_amp_update_scale", promote=AS_GIVEN)
def amp_update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    """The loss scale after a step, and how many steps in a row were finite.

    self, found_inf: (1,) or (), float32; the scale, and 1 if this step met inf or NaN.
    growth_tracker:  (1,) or (), int32; back to 0 when the scale changes.
    """
    overflow = found_inf.reshape(self.shape) != 0
    successes = growth_tracker + 1
    grows = successes.reshape(self.shape) == growth_interval
    grown = (_wide(self) * _wide(scale_growth_factor)).astype(self.dtype)
    reduced = (_wide(self) * _wide(scale_backoff_factor)).astype(self.dtype)
    scale = jnp.where(overflow, reduced, jnp.where(grows & jnp.isfinite(grown), grown, self))
    tracker = jnp.where((overflow | grows).reshape(growth_tracker.shape), 0, successes)
    return scale, tracker.astype(growth_tracker.dtype)
