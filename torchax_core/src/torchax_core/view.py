"""View: a Tensor that is a chain of view ops over another's Storage. Reads apply the chain, writes go back through it.

A chain is a `Path`: a node per view op, interned, so that the compiled reader and writer of a chain are made once. What
changes from one view to the next without changing the program (the index of a select, the start of a slice) is kept
apart, in `View._offsets`, and traced.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torchax_core.convert import is_traced
from torchax_core.errors import ViewWriteError
from torchax_core.opset import ViewRules
from torchax_core.tensor import DEVICE, Aval, Storage, Tensor, _strided, active, make_wrapper, tensors_among

__all__ = ["AS_STRIDED", "ROOT", "Path", "View", "ViewReads", "make_view", "read_views", "view_wrapper"]


class Path:
    """A chain of view ops. `read(base, offsets)` and `write(base, offsets, new)` are compiled once per chain and shape.

    rules, static: the last op of the chain and its static arguments; None for the empty chain.
    piece:         which of several results (split, unbind) it is, or None.
    offsets:       how many traced ints this last op takes; they follow those of the ops before it.
    """

    __slots__ = ("_donating", "_read", "_write", "children", "offsets", "parent", "piece", "rules", "static", "steps")

    def __init__(
        self,
        parent: Path | None = None,
        rules: ViewRules | None = None,
        static: tuple[Any, ...] = (),
        offsets: int = 0,
        piece: int | None = None,
    ) -> None:
        self.parent = parent
        self.rules = rules
        self.static = static
        self.offsets = offsets
        self.piece = piece
        self.steps: tuple[Path, ...] = () if parent is None else (*parent.steps, self)
        self.children: dict[Any, Path] = {}
        self._read: Callable[..., jax.Array] | None = None
        self._write: Callable[..., jax.Array] | None = None
        self._donating: Callable[..., jax.Array] | None = None

    def child(self, rules: ViewRules, static: tuple[Any, ...], offsets: int, piece: int | None = None) -> Path:
        """This chain with one more op."""
        key = (rules, static, piece)
        found = self.children.get(key)
        if found is None:
            found = self.children.setdefault(key, Path(self, rules, static, offsets, piece))
        return found

    def read(self, base: jax.Array, offsets: tuple[int, ...]) -> jax.Array:
        """The elements of the view, in its logical shape."""
        if self._read is None:
            self._read = jax.jit(self._read_steps, inline=True)
        return self._read(base, *offsets)

    def write(self, base: jax.Array, offsets: tuple[int, ...], new: jax.Array, *, donate: bool) -> jax.Array:
        """`base` with `new` (the view's shape) in the place of the view's elements; `donate` gives up `base`."""
        if self._write is None:
            self._write = jax.jit(self._write_steps, inline=True)
            self._donating = jax.jit(self._write_steps, donate_argnums=(0,))
        if donate:
            return self._donating(base, new, *offsets)  # type: ignore[misc]
        return self._write(base, new, *offsets)

    def read_inline(self, base: jax.Array, offsets: tuple[Any, ...]) -> jax.Array:
        """As `read`, part of a program being traced."""
        with jax.enable_x64(True):
            for step, used in self._with_offsets(offsets):
                base = step._read_one(base, used)
            return base

    def write_inline(self, base: jax.Array, new: jax.Array, offsets: tuple[Any, ...]) -> jax.Array:
        """As `write`, part of a program being traced."""
        with jax.enable_x64(True):
            steps = list(self._with_offsets(offsets))
            bases = [base]
            for step, used in steps[:-1]:
                bases.append(step._read_one(bases[-1], used))
            for (step, used), onto in zip(reversed(steps), reversed(bases), strict=True):
                new = step._write_one(onto, new, used)
            return new

    def _read_steps(self, base: jax.Array, *offsets: Any) -> jax.Array:
        return self.read_inline(base, offsets)

    def _write_steps(self, base: jax.Array, new: jax.Array, *offsets: Any) -> jax.Array:
        return self.write_inline(base, new, offsets)

    def _with_offsets(self, offsets: tuple[Any, ...]) -> list[tuple[Path, tuple[Any, ...]]]:
        pairs, at = [], 0
        for step in self.steps:
            pairs.append((step, offsets[at : at + step.offsets]))
            at += step.offsets
        return pairs

    def _read_one(self, base: jax.Array, offsets: tuple[Any, ...]) -> jax.Array:
        result = self.rules.read(base, *self.static, *offsets)  # type: ignore[union-attr]
        return result if self.piece is None else result[self.piece]

    def _write_one(self, base: jax.Array, new: jax.Array, offsets: tuple[Any, ...]) -> jax.Array:
        if self.rules.write is not None and self.piece is None:  # type: ignore[union-attr]
            return self.rules.write(base, new, *self.static, *offsets)  # type: ignore[union-attr]
        positions = self._read_one(jnp.arange(base.size).reshape(base.shape), offsets)
        if math.prod(positions.shape) != new.size:
            raise ViewWriteError(
                f"a write to a view of shape {tuple(new.shape)} cannot be mapped to its base of shape {base.shape}: the "
                "view op gives no `write_back`, and its elements are not those of the base. Add one, as "
                "docs/views.md shows, or write to the base."
            )
        flat = base.reshape(-1).at[positions.reshape(-1)].set(new.reshape(-1).astype(base.dtype))
        return flat.reshape(base.shape)

    def __repr__(self) -> str:
        names = [f"{step.rules.read.__name__}{step.static}" for step in self.steps if step.rules]
        return " -> ".join(["base", *names])


ROOT = Path()


class View(Tensor):
    """A Tensor whose elements lie in another Tensor's storage."""

    _path: Path
    _offsets: tuple[int, ...]
    _cache: jax.Array | None = None
    _seen: int = -1

    def _is_view(self) -> bool:
        # The stand-ins that dynamo makes of a base and its views cannot be views of each other; what arguments share is
        # looked at when the compiled function runs.
        return torch._guards.TracingContext.try_get() is None and super()._is_view()

    def _is_read(self) -> bool:
        return self._seen == self._store.version and self._cache is not None

    def _array(self) -> jax.Array:
        store = self._store
        if self._seen == store.version and self._cache is not None:
            return self._cache
        base = store.array
        if is_traced(base):
            # inside a program there is nothing to compile for other offsets: they are constants of it
            trace = active.trace
            read = self._path.read_inline if trace is None else functools.partial(trace.view_reads.read, self._path)
            array = read(base, self._offsets)
            if not _at_level_of(base, array):
                return array
        else:
            array = self._path.read(base, self._offsets)
        self._cache = array
        self._seen = store.version
        return array

    def _write(self, array: jax.Array) -> None:
        store = self._store
        base = store.array
        # 3: the storage's own reference, the local one, and the argument of getrefcount. One more, and somebody else
        # (a user's `.jax()`, a residual of a vjp, another storage) relies on the array as it is.
        if is_traced(base) or is_traced(array):
            new = self._path.write_inline(base, array, self._offsets)
        else:
            donate = sys.getrefcount(base) <= 3 and array is not base
            new = self._path.write(base, self._offsets, array, donate=donate)
        store.write(new)
        self._cache = array
        self._seen = store.version


def _at_level_of(base: Any, array: Any) -> bool:
    """Whether what was read of `base` may be kept beside it. In the body of a loop it is of no use outside."""
    return getattr(array, "_trace", None) is base._trace


class ViewReads:
    """What one trace has read of arrays through views. Of a view and a view of that, the first is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[jax.Array, dict[Any, jax.Array]]] = {}  # by the array's identity

    def read(self, path: Path, base: jax.Array, offsets: tuple[Any, ...]) -> jax.Array:
        """As `path.read_inline`."""
        _, known = self._known.setdefault(id(base), (base, {}))
        array, at = base, 0
        with jax.enable_x64(True):
            for step, used in path._with_offsets(offsets):
                at += step.offsets
                key = (step, offsets[:at])
                found = known.get(key)
                if found is None:
                    found = step._read_one(array, used)
                    if _at_level_of(base, found):
                        known[key] = found
                array = found
        return array


def make_view(store: Storage, aval: Aval, offset: int, path: Path, offsets: tuple[int, ...]) -> Tensor:
    """A View; `offset` is torch's storage_offset, in elements. Reads nothing."""
    view = make_wrapper(*view_wrapper(aval, offset))
    view._store = store
    view._aval = aval
    view._path = path
    view._offsets = offsets
    return view  # type: ignore[return-value]


def view_wrapper(aval: Aval, offset: int) -> tuple[Any, ...]:
    """What a View is made from: the arguments of torch's `_make_wrapper_subclass`."""
    return (View, aval.shape, aval.stride, offset, None, aval.dtype, _strided, DEVICE)


def read_views(values: Any) -> None:
    """Read the views among a call's arguments, once for all ops that take them: in a program that costs nothing, and the ops
    are then traced as for any tensor."""
    for tensor in tensors_among(values):
        if tensor.__class__ is View:
            tensor._array()


def _as_strided(
    base: jax.Array, base_stride: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: Any
) -> jax.Array:
    """Any window on a storage's memory, by a gather. `base_stride` says in which order memory holds `base`."""
    order = _memory_order(base_stride)
    memory = jnp.transpose(base, order).reshape(-1)
    return memory[_positions(size, stride, offset)]


AS_STRIDED = ViewRules(_as_strided)
"""The view op that starts from the storage rather than from the tensor it is called on."""


@AS_STRIDED.write_back
def _as_strided_write(
    base: jax.Array,
    new: jax.Array,
    base_stride: tuple[int, ...],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: Any,
) -> jax.Array:
    order = _memory_order(base_stride)
    turned = jnp.transpose(base, order)
    memory = turned.reshape(-1).at[_positions(size, stride, offset)].set(new.astype(base.dtype))
    inverse = sorted(range(base.ndim), key=order.__getitem__)
    return jnp.transpose(memory.reshape(turned.shape), inverse)


def _memory_order(stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))


def _positions(size: tuple[int, ...], stride: tuple[int, ...], offset: Any) -> jax.Array:
    positions = jnp.asarray(offset)
    for n, step in zip(size, stride, strict=True):
        positions = positions[..., None] + jnp.arange(n) * step
    return positions
