"""Of classes: cross entropy, without keeping log-probabilities, and one_hot.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html and .one_hot.html
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from torchax_core import OpSet, opmath

__all__ = ["ops"]

ops = OpSet("torchax_ops_jtorch.classes")

_NONE, _MEAN = 0, 1
_NORMALIZER = "normalizer"


# Decomposed, its log_softmax and nll_loss would run in float32 under autocast.
ops.autocast("fp32", ["aten::cross_entropy_loss"])


def _gradients(self, target, weight=None, *_, **__):
    """Of the weights of classes torch has no gradients, and says so."""
    return "decompose" if weight is not None and weight.requires_grad and target.shape != self.shape else "vjp"


@ops.lowering("aten::cross_entropy_loss", static=("label_smoothing",), composite_grad=_gradients)
def cross_entropy_loss(self, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    """Minus the logarithm of the softmax of `self` at the target class, half types in float32.

    self:            (n, classes, ...) or (classes,).
    target:          (n, ...) or (), classes; those equal to `ignore_index` count nothing, and one out of range, which CPU
                     torch refuses, reads the nearest class (see the check below). Or probabilities, as `self`.
    weight:          None or (classes,), what each class counts.
    reduction:       0 none, 1 the mean (over what the targets count), 2 the sum.
    label_smoothing: this share of each target goes to all classes evenly.
    returns:         as `target` without classes, or () if reduced. NotImplemented for dtypes that CPU torch refuses.
    """
    probabilities = target.shape == self.shape
    if not jnp.issubdtype(self.dtype, jnp.floating) or (weight is not None and weight.dtype != self.dtype):
        return NotImplemented
    if not probabilities and target.dtype not in (jnp.int64, jnp.uint8):
        return NotImplemented
    axis = 1 if self.ndim > 1 else 0
    per_class = None if weight is None else opmath(weight).reshape(-1, *(1,) * (self.ndim - axis - 1))
    if probabilities:
        body = functools.partial(_of_probabilities, axis=axis, smoothing=label_smoothing)
    else:
        body = functools.partial(_of_classes, axis=axis, smoothing=label_smoothing)
        target = jnp.where(target == ignore_index, -1, target.clip(0, self.shape[axis] - 1).astype(jnp.int32))
    # Kept for the backward are the inputs and the normalizers, and from these the softmax is computed anew.
    kept = jax.checkpoint_policies.save_only_these_names(_NORMALIZER)
    loss = jax.checkpoint(body, policy=kept, prevent_cse=False)(self, target, per_class)
    if reduction != _MEAN:
        return loss if reduction == _NONE else loss.sum()
    if probabilities:
        return loss.mean() if self.shape[axis] else jnp.nan
    counts = (target >= 0) if weight is None else jnp.where(target < 0, 0, opmath(weight)[target])
    return loss.sum() / counts.sum()


@ops.value_check("aten::cross_entropy_loss", values=("target",))
def _cross_entropy_refused(self, target, ignore_index=-100):
    """Whether a target is no class; probabilities may be anything."""
    if target.shape == self.shape or not target.size:
        return False
    classes = self.shape[1 if len(self.shape) > 1 else 0]
    return bool(np.any((target != ignore_index) & ((target < 0) | (target >= classes))))


def _of_classes(x: Any, target: Any, weight: Any, *, axis: int, smoothing: float) -> Any:
    """Cross entropy with the classes `target`, -1 where nothing counts: (n, ...)."""
    x, place = opmath(x), jnp.expand_dims(jnp.maximum(target, 0), axis)
    highest, log_total = _normalizer(x, axis)
    loss = (log_total - (_picked(x, place, axis) - highest)).squeeze(axis)
    if weight is not None:
        loss = loss * weight.reshape(-1)[jnp.maximum(target, 0)]
    if smoothing > 0:
        losses = log_total - (x - highest)
        evenly = (losses if weight is None else losses * weight).sum(axis)
        loss = (1 - smoothing) * loss + smoothing / x.shape[axis] * evenly
    return jnp.where(target < 0, 0, loss)


def _of_probabilities(x: Any, target: Any, weight: Any, *, axis: int, smoothing: float) -> Any:
    """Cross entropy with the probabilities `target`: (n, ...)."""
    x, target = opmath(x), opmath(target)
    highest, log_total = _normalizer(x, axis)
    if smoothing > 0:
        target = target * (1 - smoothing) + smoothing / x.shape[axis]
    losses = (log_total - (x - highest)) * target
    return (losses if weight is None else losses * weight).sum(axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalizer(x: Any, axis: int) -> Any:
    """The highest of `x` along an axis, and the logarithm of the sum of exp(x - highest): each with that axis 1 long.

    Their sum has logsumexp's derivative; kept apart, what is near the highest keeps its digits.
    """
    highest = x.max(axis, keepdims=True, initial=-jnp.inf)
    return highest, jnp.log(jnp.exp(x - highest).sum(axis, keepdims=True))


@_normalizer.defjvp
def _(axis: int, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    highest, log_total = (checkpoint_name(part, _NORMALIZER) for part in _normalizer(x, axis))
    softmax = jnp.exp(x - highest - log_total)
    return (highest, log_total), (jnp.zeros_like(highest), (softmax * dx).sum(axis, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _picked(x: Any, place: Any, axis: int) -> Any:
    """The element of `x` at `place` along an axis, which stays, 1 long. Its gradient is a comparison, which XLA fuses into
    the softmax's; a gather's is a scatter, which it does not."""
    return jnp.take_along_axis(x, place, axis, mode="promise_in_bounds")


@_picked.defjvp
def _(axis: int, primals: Any, tangents: Any) -> Any:
    (x, place), (dx, _) = primals, tangents
    at_place = jax.lax.broadcasted_iota(place.dtype, x.shape, axis) == place
    return _picked(x, place, axis), jnp.where(at_place, dx, 0).sum(axis, keepdims=True)


@ops.lowering("aten::one_hot")
def one_hot(self, num_classes=-1):
    """1 at the class that `self` holds, 0 at the others: (...) -> (..., num_classes), all zeros for a class out of range.

    NotImplemented without a number of classes, which is then one more than the largest.
    """
    return NotImplemented if num_classes < 0 else self[..., None] == jnp.arange(num_classes)


@ops.value_check("aten::one_hot", values=("self",))
def _one_hot_refused(self, num_classes=-1):
    return num_classes >= 0 and bool(np.any((self < 0) | (self >= num_classes)))
