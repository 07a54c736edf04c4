"""Non-maximum suppression: `torchvision::nms`, and a form of bounded size for compiled code.

The result of nms is as long as the number of boxes kept, which only the data tells: the op runs eagerly. Code under
`torchax_core.jit`, and JAX code under `jax.jit`, uses :func:`nms_padded`, whose result has a length the caller chose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from torchax_core import OpSet, opmath
from torchax_core.errors import ShapeError

__all__ = ["nms_padded", "ops"]

ops = OpSet("torchax_ops_vision.nms")
ops.autocast("fp32", ["torchvision::nms"])

# Boxes are settled this many at a time: one step compares a block with all boxes, O(block * n) memory.
_BLOCK = 128


@ops.lowering(
    "torchvision::nms",
    static=["iou_threshold"],
    data_dependent="torchax_ops_vision.nms_padded(dets, scores, iou_threshold, max_output), a result of fixed length",
)
def nms(dets, scores, iou_threshold):
    """The boxes left when each, best score first, has removed those it overlaps by an IoU above `iou_threshold`.

    dets:    (n, 4), floating: x1, y1, x2, y2.
    scores:  (n,), the dtype of `dets`; equal scores keep their order, NaN comes first, as in torchvision's CPU kernel.
    returns: indices of the kept boxes, int64, by falling score.
    raises:  ShapeError, or RuntimeError if the dtypes differ: where torchvision raises RuntimeError.
    """
    _check(dets, scores)
    # A detector calls this with another n for every image. Padding to a power of two keeps that to a few programs, and
    # doing so in numpy costs no compilation either; the data comes to the host in any case, to count what is kept.
    n = dets.shape[0]
    padded = 1 << max(n - 1, 0).bit_length()
    boxes, values = (np.asarray(opmath(x)) for x in (dets, scores))
    boxes, values = np.pad(boxes, ((0, padded - n), (0, 0))), np.pad(values, (0, padded - n))
    order, kept = _settle_jit(boxes, values, _threshold(iou_threshold, boxes.dtype), np.int32(n))
    return jnp.asarray(np.asarray(order)[np.flatnonzero(np.asarray(kept))], dtype=jnp.int64)


def nms_padded(
    dets: jax.Array,
    scores: jax.Array,
    iou_threshold: float,
    max_output: int,
    *,
    classes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`torchvision::nms` with a result of fixed length, for use under jit: a JAX function.

    From torch code: `torchax_core.interop.call_jax(nms_padded, boxes, scores, 0.5, 100)`.

    dets, scores:  (n, 4) and (n,), as in `torchvision.ops.nms`.
    iou_threshold: a Python float.
    max_output:    how many boxes to return, a Python int; more than that are dropped, the worst scores first.
    classes:       (n,) ints, or None; boxes of different classes do not suppress each other (`batched_nms`).
    returns:       (max_output,) indices, the kept boxes by falling score, then -1; and how many of them are boxes, ();
                   both int32, or int64 under jax.enable_x64.
    """
    _check(dets, scores)
    boxes, values = opmath(dets), opmath(scores)
    threshold = _threshold(iou_threshold, boxes.dtype)
    order, kept = _settle(boxes, values, threshold, np.int32(boxes.shape[0]), classes)
    place = jnp.where(kept, jnp.cumsum(kept) - 1, max_output)  # what is not kept is written nowhere
    indices = jnp.full(max_output, -1, order.dtype).at[place].set(order, mode="drop")
    return indices, jnp.minimum(jnp.sum(kept), max_output)


def _check(dets: jax.Array, scores: jax.Array) -> None:
    if dets.ndim != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise ShapeError(
            "torchvision::nms: `dets` must have the shape (n, 4) and `scores` (n,), "
            f"but dets.shape={dets.shape} and scores.shape={scores.shape}."
        )
    if dets.dtype != scores.dtype:
        raise RuntimeError(
            "torchvision::nms: `dets` and `scores` must have the same dtype, "
            f"but dets.dtype={dets.dtype} and scores.dtype={scores.dtype}. Convert one of them."
        )


def _threshold(iou_threshold: float, dtype: np.dtype) -> np.generic:
    """The largest value of `dtype` that is at most `iou_threshold`.

    torchvision compares a float32 IoU with a float64 threshold. `iou > threshold` comes out the same for this value,
    which is not so for the nearest one: float32(0.1) > 0.1.
    """
    nearest = dtype.type(iou_threshold)
    return np.nextafter(nearest, dtype.type(-np.inf)) if float(nearest) > iou_threshold else nearest


def _overlaps(box: jax.Array, others: jax.Array, threshold: jax.Array) -> jax.Array:
    """Which pairs overlap by an IoU above `threshold`: (b, 5) and (n, 5), coordinates and area -> (b, n)."""
    box = box[:, None, :]
    lengths = jnp.minimum(box[..., 2:4], others[:, 2:4]) - jnp.maximum(box[..., 0:2], others[:, 0:2])
    lengths = jnp.maximum(lengths, 0)
    # The minimum changes no value: it keeps XLA from fusing this product and the difference below into one operation,
    # rounded once, that can decide otherwise than torchvision right at the threshold.
    common = jnp.minimum(lengths[..., 0] * lengths[..., 1], jnp.finfo(lengths.dtype).max)
    return common / (box[..., 4] + others[:, 4] - common) > threshold


def _settle(boxes, scores, threshold, n, classes=None) -> tuple[jax.Array, jax.Array]:
    """Sort by score and suppress: the order, (m,) int, and which places in that order are kept, (m,) bool.

    Only the first `n` of the m boxes are real. Blocks are settled in order of score: within a block, "kept if no kept
    box before it overlaps it" has exactly one solution, and repeating it from any start reaches that solution, one more
    box settled each time (usually two or three rounds). The block's survivors then suppress all later boxes.
    """
    m = boxes.shape[0]
    real = jnp.arange(m) < n
    order = jnp.argsort(scores, descending=True, stable=True)
    order = order[jnp.argsort(~real[order], stable=True)]  # what is not real goes last, whatever its score
    boxes = boxes[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    boxes = jnp.concatenate([boxes, area[:, None]], axis=1)
    padding = max(1, -(-m // _BLOCK)) * _BLOCK - m
    boxes = jnp.pad(boxes, ((0, padding), (0, 0)))
    alive = jnp.pad(real[order], (0, padding))
    label = None if classes is None else jnp.pad(classes[order], (0, padding))
    place = jnp.arange(m + padding)
    earlier = jnp.arange(_BLOCK)[:, None] < jnp.arange(_BLOCK)

    def settle_block(block, alive):
        first = block * _BLOCK

        def own(x):
            return jax.lax.dynamic_slice_in_dim(x, first, _BLOCK)

        overlap = _overlaps(own(boxes), boxes, threshold)
        if label is not None:
            overlap &= own(label)[:, None] == label
        within = jax.lax.dynamic_slice_in_dim(overlap, first, _BLOCK, axis=1) & earlier
        candidates = own(alive)

        def again(state):
            before, now = state
            return now, candidates & ~jnp.any(within & now[:, None], axis=0)

        start = candidates, candidates & ~jnp.any(within & candidates[:, None], axis=0)
        _, survivors = jax.lax.while_loop(lambda state: jnp.any(state[0] != state[1]), again, start)
        alive &= ~(jnp.any(overlap & survivors[:, None], axis=0) & (place >= first + _BLOCK))
        return jax.lax.dynamic_update_slice_in_dim(alive, survivors, first, axis=0)

    blocks = (n + _BLOCK - 1) // _BLOCK
    alive = jax.lax.fori_loop(0, blocks, settle_block, alive)
    return order, alive[:m]


@jax.jit
def _settle_jit(boxes, scores, threshold, n):
    return _settle(boxes, scores, threshold, n)
