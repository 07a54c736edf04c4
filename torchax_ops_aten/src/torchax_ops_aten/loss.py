"""Losses: nll_loss, the margin losses, CTC, and their backwards.

The pointwise losses (mse, smooth_l1, huber, binary_cross_entropy, soft_margin) are left to torch's decompositions,
which compile to the same programs. `reduction` is 0 for none, 1 for the mean and 2 for the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax_core.opset import OpSet
from torchax_core.promotion import opmath
from torchax_ops_aten._values import outside

ops = OpSet("torchax_ops_aten.loss")

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(loss: jax.Array, reduction: int) -> jax.Array:
    if reduction == _NONE:
        return loss
    return loss.mean() if reduction == _MEAN else loss.sum()


# -- negative log likelihood ------------------------------------------------------------------------


def _target_weights(self: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int) -> jax.Array:
    """What each target counts: the weight of its class, 0 if it is to be ignored."""
    kept = target != ignore_index
    if weight is None:
        return kept.astype(opmath(self).dtype)
    return jnp.where(kept, opmath(weight).at[jnp.where(kept, target, 0)].get(mode="promise_in_bounds"), 0)


def _class_dim(self: jax.Array) -> int:
    return 1 if self.ndim > 1 else 0


@ops.lowering("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    """Minus the log-probability of the target class, weighted.

    self:    (n, classes), (n, classes, h, w) or (classes,), log-probabilities.
    target:  (n,), (n, h, w) or (), classes; those equal to `ignore_index` count nothing. One out of range, which CPU
             torch refuses, reads the nearest class.
    weight:  None or (classes,).
    returns: the loss, in the shape of `target` or () if reduced, the mean over the weights; and their sum, (), which
             is 0 if not reduced.
    """
    dim = _class_dim(self)
    weights = _target_weights(self, target, weight, ignore_index)
    safe = jnp.expand_dims(jnp.where(target == ignore_index, 0, target), dim).astype(jnp.int32)
    picked = jnp.take_along_axis(opmath(self), safe, dim, mode="promise_in_bounds").squeeze(dim)
    # `where` as well, since 0 times an infinite loss is not 0
    loss = jnp.where(target == ignore_index, 0, -picked * weights)
    if reduction == _NONE:
        return loss, jnp.zeros((), loss.dtype)
    total = weights.sum()
    return loss.sum() / total if reduction == _MEAN else loss.sum(), total


@ops.value_check("aten::nll_loss_forward", "aten::nll_loss2d_forward", values=("target",))
def _nll_loss_refused(self, target, ignore_index):
    classes = self.shape[0 if len(self.shape) == 1 else 1]
    return outside(target[target != ignore_index], classes)


@ops.lowering("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    """The gradient of `self`: minus the weight at the target class, 0 elsewhere.

    It is written as a comparison with every class, which XLA fuses; a scatter would not be.
    """
    dim = _class_dim(self)
    grad = opmath(grad_output)
    if reduction == _MEAN:
        grad = grad / opmath(total_weight)
    grad = jnp.where(target == ignore_index, 0, -grad * _target_weights(self, target, weight, ignore_index))
    at_target = lax.broadcasted_iota(target.dtype, self.shape, dim) == jnp.expand_dims(target, dim)
    return jnp.where(at_target, jnp.expand_dims(grad, dim), 0)


# -- margin losses --------------------------------------------------------------------------------
#
# Their backwards are jax.vjp of the forwards, so hinges are `where`, not `maximum`, whose gradient at 0 is 1/2.


def _hinge(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, 0)


@ops.lowering("aten::multi_margin_loss", static=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=1):
    """The mean over classes j of `weight[y] * max(0, margin - self[y] + self[j]) ** p`, y the target, j other than y.

    self: (n, classes) or (classes,); target: (n,), (1,) or (); weight: None or (classes,); p: 1 or 2.
    returns: (n,), or () if reduced. Without a batch (1,), as torch's meta kernel has it (its CPU kernel: ()).
    """
    x = opmath(self).reshape(-1, self.shape[-1]) if self.ndim else opmath(self).reshape(1, 1)
    y = target.reshape(-1, 1).astype(jnp.int32)
    picked = jnp.take_along_axis(x, y, 1, mode="promise_in_bounds")
    loss = _hinge(margin - picked + x) ** int(p)
    if weight is not None:
        loss = loss * opmath(weight).at[y].get(mode="promise_in_bounds")
    loss = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) == y, 0, loss)
    loss = loss.sum(axis=1) / x.shape[1]
    return _reduced(loss, reduction)


@ops.value_check("aten::multi_margin_loss", values=("target",))
def _multi_margin_loss_refused(self, target):
    return outside(target, self.shape[-1] if self.shape else 1)


@ops.lowering("aten::multi_margin_loss_backward", static=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=1):
    """The gradient of `self` in :func:`multi_margin_loss`."""
    loss, pull = jax.vjp(lambda x: multi_margin_loss(x, target, p, margin, weight, reduction), opmath(self))
    return pull(opmath(grad_output).reshape(loss.shape))[0].astype(self.dtype)


@ops.lowering("aten::multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self, target, reduction):
    """The sum over target classes y and other classes j of `max(0, 1 - self[y] + self[j])`, over the classes.

    self:    (n, classes) or (classes,).
    target:  the same shape: the target classes of each row, up to the first -1.
    returns: the loss, (n,), or () if reduced; 1 at the classes that are targets, 0 elsewhere, like `target`. Without
             a batch the loss is (1,), as torch's meta kernel has it (its CPU kernel: ()).
    """
    classes = self.shape[-1] if self.ndim else 1
    x = opmath(self).reshape(-1, classes)
    y = target.reshape(-1, classes).astype(jnp.int32)
    listed = jnp.cumsum(y < 0, axis=1) == 0
    rows = jnp.arange(x.shape[0])[:, None]
    is_target = jnp.zeros(x.shape, bool).at[rows, jnp.where(listed, y, classes)].set(True, mode="drop")
    picked = jnp.take_along_axis(x, jnp.maximum(y, 0), 1, mode="promise_in_bounds")
    pairs = _hinge(1 - picked[:, :, None] + x[:, None, :])
    loss = jnp.where(listed[:, :, None] & ~is_target[:, None, :], pairs, 0).sum(axis=(1, 2)) / max(classes, 1)
    return _reduced(loss, reduction), is_target.astype(self.dtype).reshape(target.shape)


@ops.value_check("aten::multilabel_margin_loss_forward", values=("target",))
def _multilabel_margin_loss_refused(self, target):
    return outside(target, self.shape[-1] if self.shape else 1, lowest=-1)


@ops.lowering("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    """The gradient of `self` in :func:`multilabel_margin_loss_forward`."""
    loss, pull = jax.vjp(lambda x: multilabel_margin_loss_forward(x, target, reduction)[0], opmath(self))
    return pull(opmath(grad_output).reshape(loss.shape))[0].astype(self.dtype)


# -- connectionist temporal classification ------------------------------------------------------------
#
# The names follow Graves et al., https://www.cs.toronto.edu/~graves/icml_2006.pdf: `alpha[t, s]` is the log-probability
# of all beginnings of an alignment, up to time t, that end at position s of the labels with blanks in between.


def _logsumexp(*terms: jax.Array) -> jax.Array:
    """The logarithm of a sum of exponentials, whose gradient is 0, not NaN, where all terms are -inf."""
    stacked = jnp.stack(terms)
    largest = lax.stop_gradient(stacked.max(axis=0))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = jnp.exp(stacked - largest).sum(axis=0)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + largest, -jnp.inf)


def _padded_targets(targets: jax.Array, lengths: jax.Array, longest: int) -> jax.Array:
    """(n, longest): the targets of each sequence, from padded (n, s) ones or concatenated (sum of lengths,) ones."""
    n = lengths.size
    if targets.ndim == 2:
        return targets[:, :longest]
    if targets.size == 0:
        return jnp.zeros((n, longest), targets.dtype)
    start = jnp.cumsum(lengths) - lengths
    at = start[:, None] + jnp.arange(longest)
    return targets[jnp.minimum(at, targets.size - 1)]


def _ctc(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array, blank: int
) -> tuple[jax.Array, jax.Array]:
    """The loss (n,), and alpha (time, n, 2 * s + 1), of log_probs (time, n, classes) and padded targets (n, s)."""
    time, n, _ = log_probs.shape
    states = 2 * targets.shape[1] + 1
    labels = jnp.full((n, states), blank, jnp.int32).at[:, 1::2].set(targets.astype(jnp.int32))
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (time, n, states)), 2, mode="promise_in_bounds")
    # A label may follow another directly, without the blank in between, if the two differ.
    skips = jnp.zeros((n, states), bool).at[:, 3::2].set(targets[:, 1:] != targets[:, :-1])
    state = lax.broadcasted_iota(jnp.int32, (n, states), 1)
    reached = state < jnp.minimum(2, 2 * target_lengths[:, None] + 1)

    def before(alpha: jax.Array, by: int) -> jax.Array:
        padding = jnp.full((n, by), -jnp.inf, alpha.dtype)
        return jnp.concatenate([padding, alpha], axis=1)[:, :states]

    def step(alpha: jax.Array, emitted: jax.Array) -> tuple[jax.Array, jax.Array]:
        skipped = jnp.where(skips, before(alpha, 2), -jnp.inf)
        alpha = _logsumexp(alpha, before(alpha, 1), skipped) + emitted
        return alpha, alpha

    if time == 0:
        alphas = emitted
    else:
        first = jnp.where(reached, emitted[0], -jnp.inf)
        alphas = jnp.concatenate([first[None], lax.scan(step, first, emitted[1:])[1]])
    # Time 0 lacks a predecessor: the empty alignment, which is right only for an empty target.
    empty = jnp.where(jnp.arange(states) == 0, 0.0, -jnp.inf).astype(alphas.dtype)
    alphas_from_0 = jnp.concatenate([jnp.broadcast_to(empty, (1, n, states)), alphas])
    last = alphas_from_0[input_lengths, jnp.arange(n)]
    end = 2 * target_lengths[:, None]
    at_blank = jnp.take_along_axis(last, end, 1)[:, 0]
    at_label = jnp.where(end[:, 0] > 0, jnp.take_along_axis(last, jnp.maximum(end - 1, 0), 1)[:, 0], -jnp.inf)
    return -_logsumexp(at_blank, at_label), alphas


def _ctc_arguments(
    log_probs: jax.Array, targets: jax.Array, input_lengths: object, target_lengths: object
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The arguments of :func:`_ctc`: with a batch dimension, lengths as arrays, targets padded.

    The longest target is known if the lengths are; else, of lengths in a tensor, the targets' own length bounds it.
    """
    if log_probs.ndim == 2:
        log_probs = log_probs[:, None]
        targets = targets.reshape(1, -1)
    if isinstance(target_lengths, tuple):
        longest = max(target_lengths, default=0)
    else:
        longest = targets.shape[-1]
    inputs = jnp.asarray(np.asarray(input_lengths, np.int32) if isinstance(input_lengths, tuple) else input_lengths)
    lengths = jnp.asarray(np.asarray(target_lengths, np.int32) if isinstance(target_lengths, tuple) else target_lengths)
    inputs, lengths = inputs.reshape(-1).astype(jnp.int32), lengths.reshape(-1).astype(jnp.int32)
    return opmath(log_probs), _padded_targets(targets, lengths, longest), inputs, lengths


@ops.decomposition("aten::ctc_loss.Tensor", whole=False)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """:func:`_ctc_loss`, reduced; lengths may be on the CPU, as on cuda: torch divides by them where they are."""
    inputs, lengths = (x.to(log_probs.device) for x in (input_lengths, target_lengths))
    loss, _ = torch._ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0, loss)
    if reduction == 1:  # mean
        return (loss / lengths.clamp_min(1)).mean()
    return loss.sum() if reduction else loss


@ops.lowering("aten::_ctc_loss", "aten::_ctc_loss.Tensor")
def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """The connectionist temporal classification loss.

    log_probs:      (time, n, classes) or (time, classes).
    targets:        (n, s) padded, or (sum of target_lengths,) concatenated; no blanks.
    input_lengths, target_lengths: (n,), as ints or as tensors; tensors do not compile anew for each batch.
    returns:        the loss (n,), or () without a batch; and `alpha` (n, time, 2 * longest target + 1).
    source:         torch.nn.CTCLoss, https://docs.pytorch.org/docs/stable/generated/torch.nn.CTCLoss.html
    """
    loss, alpha = _ctc(*_ctc_arguments(log_probs, targets, input_lengths, target_lengths), blank)
    alpha = jnp.moveaxis(alpha, 0, 1)
    return (loss, alpha) if log_probs.ndim == 3 else (loss[0], alpha[0])


@ops.lowering("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def _ctc_loss_backward(
    grad,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    neg_log_likelihood,
    log_alpha,
    blank,
    zero_infinity=False,
):
    """The gradient of `log_probs` in :func:`_ctc_loss`, by jax.vjp of the recursion.

    As torch's, it holds for log_probs that are the log_softmax of something: `exp(log_probs)`, whose sum over classes
    is then 1, is added to the derivative.
    """
    x, padded, inputs, lengths = _ctc_arguments(log_probs, targets, input_lengths, target_lengths)
    loss, pull = jax.vjp(lambda x: _ctc(x, padded, inputs, lengths, blank)[0], x)
    grad = opmath(grad).reshape(loss.shape)
    time = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    out = jnp.exp(x) * grad[:, None] + pull(grad)[0]
    # No alignment exists where the loss is infinite.
    out = jnp.where(jnp.isinf(loss)[:, None], 0 if zero_infinity else jnp.nan, out)
    return jnp.where(time < inputs[:, None], out, 0).reshape(log_probs.shape)
