"""A call's arguments as a template: static values in their places, and a slot for every array of the call's flat list.

Made once per signature; a kernel's body fills it with tracers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from torchax_core.dtypes import jax_dtype
from torchax_core.view import Path, View

__all__ = [
    "GENERATOR",
    "SCALAR",
    "STATIC",
    "TENSOR",
    "TENSORS",
    "Slot",
    "cast",
    "concrete_template",
    "fill",
    "hashable",
    "jax_value",
    "kind_of",
    "leaves_of",
    "operands_of",
    "scalar_dtype",
    "template_of",
    "to_dtype",
]

# What the schema says of an argument, as far as a call needs to know.
TENSOR, TENSORS, SCALAR, STATIC, GENERATOR = "tensor", "tensors", "scalar", "static", "generator"


def kind_of(argument: Any, static: frozenset[str]) -> str:
    kind = str(argument.type)
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
    if kind == "Tensor":
        return TENSOR
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return TENSORS
    if kind == "Generator":
        return GENERATOR
    if kind in ("number", "float", "List[number]", "List[float]") and argument.name not in static:
        return SCALAR
    return STATIC


@dataclasses.dataclass(frozen=True)
class Slot:
    """In a template of arguments: the `index`-th array of the call, cast to `dtype` if that is given.

    With a `path`, that array is the base of a view: the view is read here, inside the op's own program, through `path` and
    the `offsets` arrays that follow.
    """

    index: int
    dtype: np.dtype | None = None
    path: Path | None = None
    offsets: int = 0

    def array(self, arrays: Sequence[Any]) -> Any:
        value = arrays[self.index]
        if self.path is not None:
            value = self.path.read_inline(value, tuple(arrays[self.index + 1 : self.index + 1 + self.offsets]))
        return value if self.dtype is None else to_dtype(value, self.dtype)


def jax_value(a: Any) -> Any:
    """A static argument as a lowering sees it: dtypes as numpy's, lists as tuples."""
    if isinstance(a, torch.dtype):
        return jax_dtype(a)
    if isinstance(a, (list, tuple)):
        return tuple(jax_value(x) for x in a)
    return a


def hashable(a: Any) -> Any:
    return tuple(hashable(x) for x in a) if isinstance(a, (list, tuple)) else a


def template_of(a: Any, kind: str, counter: Any) -> Any:
    """`a` with every array replaced by the slot of its place in the call's flat list; the order is that of `_scan`."""
    if isinstance(a, View) and not a._is_read():
        slot = Slot(next(counter), None, a._path, len(a._offsets))
        for _ in a._offsets:
            next(counter)
        return slot
    if isinstance(a, torch.Tensor):
        return Slot(next(counter))
    if a is None:
        return None
    if kind is STATIC or kind is GENERATOR:
        return jax_value(a)
    if isinstance(a, (list, tuple)):
        items = [template_of(x, TENSOR if kind is TENSORS else kind, counter) for x in a]
        return items
    if isinstance(a, (bool, int, float, complex, torch.SymFloat, torch.SymInt, torch.SymBool)):
        return Slot(next(counter))
    return jax_value(a)


def concrete_template(a: Any, kind: str, concrete: Callable[[Any], Any]) -> Any:
    if isinstance(a, torch.Tensor):
        return concrete(a)
    if isinstance(a, (list, tuple)) and kind is TENSORS:
        return [concrete_template(x, kind, concrete) for x in a]
    return jax_value(a)


def fill(value: Any, arrays: Sequence[Any]) -> Any:
    if value.__class__ is Slot:
        return value.array(arrays)
    if value.__class__ is list:
        return [fill(v, arrays) for v in value]
    if value.__class__ is tuple:
        return tuple(fill(v, arrays) for v in value)
    return value


def to_dtype(array: Any, dtype: np.dtype) -> Any:
    if array.dtype == dtype:
        return array
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = jnp.real(array)
    return jnp.asarray(array).astype(dtype)


def cast(value: Any, dtype: np.dtype) -> Any:
    if value.__class__ is Slot:
        return dataclasses.replace(value, dtype=dtype)
    if value.__class__ is list:
        return [cast(v, dtype) for v in value]
    return value


def leaves_of(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat.extend(leaves_of(value))
        elif isinstance(value, torch.Tensor) or (isinstance(value, (bool, int, float, complex))):
            flat.append(value)
    return flat


def operands_of(
    arguments: Sequence[Any], metas: dict[str, Any], taking: tuple[str, ...], kinds: dict[str, str]
) -> list[tuple[str, Any]]:
    """Scalar arguments that stand where other overloads have a tensor: positional ones (`other`, `exponent`, `min`)."""
    return [
        (a.name, metas[a.name])
        for a in arguments
        if not a.kwarg_only
        and a.name in taking
        and a.name in metas
        and kinds[a.name] in (SCALAR, STATIC)
        and str(a.type) in ("number", "Optional[number]")
    ]


def scalar_dtype(tensors: list[torch.dtype], value: Any) -> np.dtype | None:
    """The dtype a number takes beside tensors that are not promoted: what those compute in. None: as wide as it came."""
    floats = [d for d in tensors if d.is_floating_point or d.is_complex]
    if not tensors or (not floats and isinstance(value, (bool, int))):
        return None
    double = any(d in (torch.float64, torch.complex128) for d in floats)
    if isinstance(value, complex):
        return np.dtype(np.complex128 if double else np.complex64)
    return np.dtype(np.float64 if double else np.float32)
