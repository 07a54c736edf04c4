"""What `lengths` times: ops that have a length, in torch, and the straightforward way to say the same in JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

LENGTH = 4096
ROWS = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of tensors, the same of JAX arrays, and what makes its arguments.

    same:           the first floating result must agree with JAX's (not where JAX's resizing has another kernel, or a
                    factorization is free in sign).
    differentiable: it can be timed with gradients.
    """

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    arguments: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    same: bool = True
    differentiable: bool = True


def normal(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    """Normal numbers in each of the shapes, float32."""
    return lambda rng: tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def with_positions(
    shape: tuple[int, ...], *positions: tuple[tuple[int, ...], int]
) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    """Normal numbers, and for each pair (shape, bound) int32 positions below the bound."""
    return lambda rng: (
        rng.standard_normal(shape).astype(np.float32),
        *(rng.integers(0, bound, size).astype(np.int32) for size, bound in positions),
    )


def matrices(*shape: int, kind: str = "") -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    """Well-conditioned square matrices; `kind` "positive": symmetric, with positive eigenvalues."""

    def make(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        a = rng.standard_normal(shape)
        if kind == "positive":
            a = a @ np.swapaxes(a, -1, -2) / shape[-1] + np.eye(shape[-1])
        else:
            a = a / math.sqrt(shape[-1]) + 2 * np.eye(shape[-1])
        return (a.astype(np.float32),)

    return make


ROW = normal((ROWS, LENGTH))

# -- scans and sorting -------------------------------------------------------------------------------------------------


def running_max(x: Any) -> Any:
    """The running maximum and where it was."""

    def later(a: Any, b: Any) -> Any:
        take = b[0] >= a[0]
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    return lax.associative_scan(later, (x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), axis=1)


def sorted_with_positions(x: Any) -> Any:
    """The sorted rows, and where each element was."""
    return lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), dimension=1, num_keys=1)


def kth(k: int) -> Callable[..., Any]:
    """The k-th of each row, by sorting."""
    return lambda x: tuple(y[:, k - 1] for y in sorted_with_positions(x))


SCANS = [
    Case("cumsum", lambda x: x.cumsum(-1), partial(jnp.cumsum, axis=-1), ROW),
    Case("cumprod", lambda x: x.cumprod(-1), partial(jnp.cumprod, axis=-1), ROW),
    Case("cummax", lambda x: tuple(x.cummax(-1)), running_max, ROW),
    Case("cummin", lambda x: tuple(x.cummin(-1)), lambda x: (-running_max(-x)[0], running_max(-x)[1]), ROW),
    Case("logcumsumexp", lambda x: x.logcumsumexp(-1), partial(lax.cumlogsumexp, axis=1), ROW),
    Case(
        "cumulative_trapezoid",
        torch.cumulative_trapezoid,
        lambda x: jnp.cumsum((x[:, 1:] + x[:, :-1]) / 2, -1),
        ROW,
    ),
    Case("sort", lambda x: tuple(x.sort(-1)), sorted_with_positions, ROW),
    Case("topk", lambda x: tuple(x.topk(16)), lambda x: lax.top_k(x, 16), ROW),
    Case("kthvalue", lambda x: tuple(x.kthvalue(100)), kth(100), ROW),
    Case("median", lambda x: tuple(x.median(-1)), kth(LENGTH // 2), ROW),
    Case("quantile", lambda x: x.quantile(0.3, -1), lambda x: jnp.quantile(x, 0.3, axis=-1), ROW),
    Case(
        "mode",
        lambda x, i: i.mode(-1).values,
        lambda x, i: jax.scipy.stats.mode(i, axis=-1).mode,
        with_positions((1,), ((ROWS, LENGTH), 100)),
        differentiable=False,
    ),
    Case(
        "searchsorted",
        torch.searchsorted,
        jax.vmap(jnp.searchsorted),
        lambda rng: (
            np.sort(rng.standard_normal((ROWS, LENGTH)).astype(np.float32), -1),
            rng.standard_normal((ROWS, LENGTH)).astype(np.float32),
        ),
        differentiable=False,
    ),
    Case(
        "bucketize",
        lambda x: torch.bucketize(x, torch.linspace(-2, 2, LENGTH, device=x.device)),
        lambda x: jnp.searchsorted(jnp.linspace(-2, 2, LENGTH), x),
        ROW,
        differentiable=False,
    ),
    Case(
        "histc",
        lambda x: x.histc(100, -2, 2),
        lambda x: jnp.histogram(x, 100, (-2, 2))[0].astype(jnp.float32),
        ROW,
        differentiable=False,
    ),
]

# -- pooling and windows -----------------------------------------------------------------------------------------------


def windows(x: Any, init: Any, function: Any, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """`lax.reduce_window` over the last dims."""
    ones = (1,) * (x.ndim - len(kernel))
    return lax.reduce_window(x, init, function, ones + kernel, ones + stride, "VALID")


def max_pool(kernel: tuple[int, ...], stride: tuple[int, ...]) -> Callable[..., Any]:
    """The maximum of each window."""
    return lambda x: windows(x, -jnp.inf, lax.max, kernel, stride)


def avg_pool(kernel: tuple[int, ...], stride: tuple[int, ...]) -> Callable[..., Any]:
    """The mean of each window."""
    return lambda x: windows(x, 0.0, lax.add, kernel, stride) / math.prod(kernel)


def max_pool_with_positions(x: Any) -> Any:
    """The maximum of each window of 3, two apart, and where it is: gathered windows and an argmax."""
    at = jnp.arange((x.shape[-1] - 3) // 2 + 1)[:, None] * 2 + jnp.arange(3)
    parts = x[..., at]
    best = parts.argmax(-1)
    return parts.max(-1), at[jnp.arange(at.shape[0]), best]


def adaptive(x: Any, count: int, function: Callable[..., Any]) -> Any:
    """Each of `count` windows of equal length reduced."""
    return function(x.reshape(*x.shape[:-1], count, -1), axis=-1)


def averages(x: Any, count: int) -> Any:
    """The mean of each of `count` windows, as adaptive pooling lays them."""
    size = x.shape[-1]
    ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return jnp.stack([x[..., start:stop].mean(-1) for start, stop in ends], -1)


def fractional_max_pool(x: Any, samples: Any) -> Any:
    """The maximum of 32 by 32 windows of 2 by 2 of 64 by 64, placed by a sample a plane and dim: gathered, then reduced."""
    alpha = (64 - 2) / (32 - 1)
    steps = jnp.floor((samples[..., None] + jnp.arange(31)) * alpha) - jnp.floor(samples[..., None] * alpha)
    starts = jnp.concatenate([steps, jnp.full((*samples.shape, 1), 62.0)], -1).astype(jnp.int32)
    at = starts[..., None] + jnp.arange(2)  # (n, c, 2, 32, 2), the dims in the order w, h

    def one(plane: Any, at: Any) -> Any:
        return plane[at[1][:, :, None, None], at[0]].max((1, 3))

    return jax.vmap(jax.vmap(one))(x, at)


def patches(x: Any) -> Any:
    """Windows of 3 by 3 as columns: (n, c * 9, positions)."""
    found = lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "VALID")
    return found.reshape(*found.shape[:2], -1)


def folded(x: Any) -> Any:
    """The transpose of `patches`."""
    like = jax.ShapeDtypeStruct((16, 32, 64, 64), x.dtype)
    return jax.linear_transpose(patches, like)(x)[0]


IMAGE = normal((16, 32, 64, 64))
VOLUME = normal((8, 8, 32, 32, 32))
SIGNAL = normal((32, 64, LENGTH))
POOLS = [
    Case("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), max_pool((3,), (2,)), SIGNAL),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2), max_pool((3, 3), (2, 2)), IMAGE),
    Case("max_pool3d", lambda x: F.max_pool3d(x, 2), max_pool((2, 2, 2), (2, 2, 2)), VOLUME),
    Case(
        "max_pool1d, indices",
        lambda x: F.max_pool1d(x, 3, 2, return_indices=True),
        max_pool_with_positions,
        SIGNAL,
    ),
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2), avg_pool((3,), (2,)), SIGNAL),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2), avg_pool((3, 3), (2, 2)), IMAGE),
    Case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), avg_pool((2, 2, 2), (2, 2, 2)), VOLUME),
    Case(
        "lp_pool1d",
        lambda x: F.lp_pool1d(x, 2.0, 3),
        lambda x: jnp.sqrt(windows(x * x, 0.0, lax.add, (3,), (3,))),
        SIGNAL,
    ),
    Case(
        "adaptive_avg_pool1d, even",
        lambda x: F.adaptive_avg_pool1d(x, 64),
        lambda x: adaptive(x, 64, jnp.mean),
        SIGNAL,
    ),
    Case(
        "adaptive_avg_pool1d, uneven",
        lambda x: F.adaptive_avg_pool1d(x, 7),
        lambda x: averages(x, 7),
        SIGNAL,
    ),
    Case(
        "adaptive_max_pool1d",
        lambda x: F.adaptive_max_pool1d(x, 64),
        lambda x: adaptive(x, 64, jnp.max),
        SIGNAL,
    ),
    Case(
        "fractional_max_pool2d",
        lambda x, s: F.fractional_max_pool2d(x, 2, 32, _random_samples=s),
        fractional_max_pool,
        lambda rng: (
            rng.standard_normal((16, 32, 64, 64)).astype(np.float32),
            rng.random((16, 32, 2)).astype(np.float32),
        ),
        differentiable=False,  # torch refuses samples that want gradients
    ),
    Case(
        "max_unpool1d",
        lambda x, i: F.max_unpool1d(x, 2 * torch.arange(x.shape[-1], device=x.device).expand(x.shape), 2),
        lambda x, i: jnp.zeros((*x.shape[:-1], 2 * x.shape[-1])).at[..., 2 * jnp.arange(x.shape[-1])].set(x),
        with_positions((16, 32, LENGTH), ((1,), 2)),
    ),
    Case("F.unfold", lambda x: F.unfold(x, 3), patches, IMAGE),
    Case("F.fold", lambda x: F.fold(x, (64, 64), 3), folded, normal((16, 288, 62 * 62))),
    Case(
        "Tensor.unfold",
        lambda x: x.unfold(-1, 16, 4) * 1,
        lambda x: x[:, 4 * jnp.arange((LENGTH - 16) // 4 + 1)[:, None] + jnp.arange(16)],
        ROW,
    ),
]

# -- recurrences and convolutions --------------------------------------------------------------------------------------

WIDTH = 32


def recurrence(gates: int, step: Callable[..., Any]) -> Callable[..., Any]:
    """A layer of steps over (length, n, width): inputs are projected at once, then `lax.scan`."""

    def run(x: Any, w: Any, u: Any) -> Any:
        start = jnp.zeros((x.shape[1], WIDTH))

        def one(carry: Any, projected: Any) -> Any:
            new = step(carry, projected, u)
            return new, new[0]

        return lax.scan(one, (start,) if gates != 4 else (start, start), x @ w.T)[1]

    return run


def rnn_step(carry: Any, projected: Any, u: Any) -> Any:
    """tanh."""
    return (jnp.tanh(projected + carry[0] @ u.T),)


def gru_step(carry: Any, projected: Any, u: Any) -> Any:
    """torch's order of gates: reset, update, new."""
    (h,) = carry
    (r, z, n), (hr, hz, hn) = jnp.split(projected, 3, -1), jnp.split(h @ u.T, 3, -1)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    return ((1 - z) * jnp.tanh(n + r * hn) + z * h,)


def lstm_step(carry: Any, projected: Any, u: Any) -> Any:
    """torch's order of gates: input, forget, cell, output."""
    h, c = carry
    i, f, g, o = jnp.split(projected + h @ u.T, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def recurrent(name: str, count: int) -> Callable[..., Any]:
    """torch's own whole-sequence function, without biases."""
    function = getattr(torch, name)

    def run(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        start = x.new_zeros(1, x.shape[1], WIDTH)
        return function(x, [start, start] if count == 4 else start, [w, u], False, 1, 0.0, False, False, False)[0]  # type: ignore[no-any-return]

    return run


def recurrent_case(name: str, function: str, count: int, step: Callable[..., Any]) -> Case:
    """4,096 steps of four rows."""
    arguments = normal((LENGTH, 4, WIDTH), (count * WIDTH, WIDTH), (count * WIDTH, WIDTH))

    def small(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return tuple(x / np.float32(math.sqrt(WIDTH)) for x in arguments(rng))

    return Case(name, recurrent(function, count), recurrence(count, step), small)


def ctc(logits: Any, labels: Any) -> Any:
    """optax's."""
    import optax  # type: ignore[import-not-found,import-untyped,unused-ignore]

    batched = jnp.swapaxes(logits, 0, 1)
    return optax.ctc_loss(batched, jnp.zeros(batched.shape[:2]), labels + 1, jnp.zeros(labels.shape))


SEQUENCES = [
    recurrent_case("rnn", "rnn_tanh", 1, rnn_step),
    recurrent_case("gru", "gru", 3, gru_step),
    recurrent_case("lstm", "lstm", 4, lstm_step),
    Case(
        "ctc_loss",
        lambda x, y: F.ctc_loss(
            x.log_softmax(-1),
            y.long() + 1,
            torch.full((4,), 1024, device=x.device),
            torch.full((4,), 32, device=x.device),
            reduction="none",
        ),
        ctc,
        with_positions((1024, 4, 32), ((4, 32), 31)),
    ),
    Case(
        "conv1d, dilation 256",
        lambda x, w: F.conv1d(x, w, dilation=256),
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "VALID", rhs_dilation=(256,)),
        normal((16, 32, LENGTH), (32, 32, 3)),
    ),
]

# -- indexing ----------------------------------------------------------------------------------------------------------

SCATTERED = with_positions((LENGTH, ROWS), ((LENGTH,), 128))
INDEXING = [
    Case(
        "index_add",
        lambda x, i: x.new_zeros(128, ROWS).index_add(0, i, x),
        lambda x, i: jnp.zeros((128, ROWS)).at[i].add(x),
        SCATTERED,
    ),
    Case(
        "scatter_reduce, amax",
        lambda x, i: x.new_zeros(128, ROWS).scatter_reduce(0, i.long()[:, None].expand(x.shape), x, "amax"),
        lambda x, i: jnp.zeros((128, ROWS)).at[jnp.broadcast_to(i[:, None], x.shape), jnp.arange(ROWS)].max(x),
        SCATTERED,
    ),
    Case(
        "index_put, accumulate",
        lambda x, i: x.new_zeros(128, ROWS).index_put((i,), x, accumulate=True),
        lambda x, i: jnp.zeros((128, ROWS)).at[i].add(x),
        SCATTERED,
    ),
    Case(
        "gather",
        lambda x, i: x.gather(0, i.long()[:, None].expand(x.shape)),
        lambda x, i: jnp.take_along_axis(x, jnp.broadcast_to(i[:, None], x.shape), 0),
        SCATTERED,
    ),
    Case(
        "embedding_bag",
        lambda w, i: F.embedding_bag(i, w, mode="sum"),
        lambda w, i: w[i].sum(1),
        with_positions((LENGTH, ROWS), ((256, 32), LENGTH)),
    ),
    Case(
        "tril_indices",
        lambda x: torch.tril_indices(512, 512, device=x.device) + x.int(),
        lambda x: jnp.stack(jnp.tril_indices(512)) + x.astype(jnp.int32),
        normal((1,)),
        differentiable=False,
    ),
    Case(
        "combinations",
        lambda x: torch.combinations(x, 2),
        lambda x: jnp.stack([x[i] for i in jnp.triu_indices(512, 1)], 1),
        normal((512,)),
    ),
    Case(
        "cdist",
        torch.cdist,
        lambda x, y: jnp.sqrt(jnp.maximum((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T, 0)),
        normal((1024, 32), (1024, 32)),
    ),
    Case(
        "cdist, p = 1",
        lambda x, y: torch.cdist(x, y, 1.0),
        lambda x, y: jnp.abs(x[:, None] - y).sum(-1),
        normal((512, 32), (512, 32)),
    ),
]

# -- resizing ----------------------------------------------------------------------------------------------------------


def resized(method: str, *size: int) -> Callable[..., Any]:
    """`jax.image.resize`, which takes half pixels as torch does with align_corners=False."""
    return lambda x: jax.image.resize(x, (*x.shape[:2], *size), method, antialias=False)


def interpolated(mode: str, scale: float = 2.0) -> Callable[..., Any]:
    """F.interpolate."""
    return lambda x: F.interpolate(x, scale_factor=scale, mode=mode)


def sampled(image: Any, grid: Any) -> Any:
    """Bilinear, zeros outside, align_corners=False."""
    n, c, h, w = image.shape
    x, y = ((grid[..., i] + 1) * size / 2 - 0.5 for i, size in ((0, w), (1, h)))
    one = partial(jax.scipy.ndimage.map_coordinates, order=1, mode="constant")
    return jax.vmap(lambda planes, y, x: jax.vmap(lambda plane: one(plane, [y, x]))(planes))(image, y, x)


RESIZING = [
    Case("interpolate nearest", interpolated("nearest"), resized("nearest", 128, 128), IMAGE),
    Case("interpolate nearest-exact", interpolated("nearest-exact"), resized("nearest", 128, 128), IMAGE),
    Case("interpolate area", interpolated("area", 0.5), avg_pool((2, 2), (2, 2)), IMAGE),
    Case("interpolate linear", interpolated("linear"), resized("linear", 2 * LENGTH), normal((2, 8, LENGTH))),
    Case("interpolate bilinear", interpolated("bilinear"), resized("bilinear", 128, 128), IMAGE),
    Case("interpolate bicubic", interpolated("bicubic"), resized("bicubic", 128, 128), IMAGE, same=False),
    Case("interpolate trilinear", interpolated("trilinear"), resized("trilinear", 64, 64, 64), VOLUME),
    Case(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        lambda x, g: sampled(x, jnp.tanh(g)),
        normal((16, 32, 64, 64), (16, 64, 64, 2)),
    ),
]

# -- matrices ----------------------------------------------------------------------------------------------------------

FACTORS = {"qr", "svd", "eigh", "eig", "lu"}
MATRIX_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "svd": (lambda a: tuple(torch.linalg.svd(a)), lambda a: jnp.linalg.svd(a), ""),
    "qr": (lambda a: tuple(torch.linalg.qr(a)), lambda a: jnp.linalg.qr(a), ""),
    "eigh": (lambda a: tuple(torch.linalg.eigh(a)), lambda a: jnp.linalg.eigh(a), "positive"),
    "eig": (lambda a: tuple(torch.linalg.eig(a)), lambda a: jnp.linalg.eig(a), ""),
    "lu": (
        lambda a: tuple(torch.linalg.lu(a)),
        lambda a: jnp.vectorize(jax.scipy.linalg.lu, signature="(n,n)->(n,n),(n,n),(n,n)")(a),
        "",
    ),
    "solve": (
        lambda a: torch.linalg.solve_ex(a, a.mT).result,
        lambda a: jnp.linalg.solve(a, jnp.swapaxes(a, -1, -2)),
        "",
    ),
    "inv": (lambda a: torch.linalg.inv_ex(a).inverse, jnp.linalg.inv, ""),
    "slogdet": (lambda a: torch.linalg.slogdet(a).logabsdet, lambda a: jnp.linalg.slogdet(a).logabsdet, ""),
    "cholesky": (lambda a: torch.linalg.cholesky_ex(a).L, lambda a: jnp.linalg.cholesky(a), "positive"),
    "pinv": (torch.linalg.pinv, lambda a: jnp.linalg.pinv(a), ""),
    "lstsq": (
        lambda a: torch.linalg.lstsq(a, a.mT).solution,
        lambda a: jnp.linalg.lstsq(a, a.T)[0] if a.ndim == 2 else jax.vmap(lambda a: jnp.linalg.lstsq(a, a.T)[0])(a),
        "",
    ),
    "matrix_exp": (torch.linalg.matrix_exp, jax.scipy.linalg.expm, ""),
}
LINALG = [
    Case(f"{name}, {' by '.join(map(str, shape))}", ours, theirs, matrices(*shape, kind=kind), name not in FACTORS)
    for name, (ours, theirs, kind) in MATRIX_OPS.items()
    for shape in ((256, 256), (64, 16, 16))
]
FFT = [
    Case("fft", torch.fft.fft, jnp.fft.fft, ROW, differentiable=False),
    Case("rfft", torch.fft.rfft, jnp.fft.rfft, ROW, differentiable=False),
    Case("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x)), lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), ROW),
    Case("fft2", torch.fft.fft2, jnp.fft.fft2, IMAGE, differentiable=False),
]

CASES = [*SCANS, *POOLS, *SEQUENCES, *INDEXING, *RESIZING, *LINALG, *FFT]
