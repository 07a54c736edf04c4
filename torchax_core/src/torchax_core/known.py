"""Values that are known while a function is traced: integers and bools that follow from constants alone.

Positions (`torch.arange(n)`), masks made of shapes, segment numbers: CPU torch computes them on the spot, and the program takes
them as constants. So they can be asked, as in eager code (`if mask.all()`, `lengths.tolist()`), and what a model finds out about
them (that no sequence is packed, that nothing is padded) costs the program nothing. Integers, because those are the same
whoever computes them; small ones, because they lie in the program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torchax_core.convert import array_from_torch, is_traced, torch_from_array
from torchax_core.forms import MISS
from torchax_core.overrides import DecliningKernel
from torchax_core.tensor import DEVICE_TYPE, Aval, Storage, Tensor, make_tensor
from torchax_core.view import View

__all__ = ["KnownValues"]

_LARGEST = 1 << 16  # elements; of ranges twice that
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_FACTORIES = frozenset({"arange", "full", "ones", "scalar_tensor", "zeros", "tril_indices", "triu_indices"})
_NO_LARGER = frozenset(
    """
    _local_scalar_dense _to_copy _unique2 all amax amin any argmax argmin argsort bucketize cat clone
    count_nonzero cummax cummin cumprod cumsum diff equal flip full_like gather isin max min nonzero ones_like
    prod roll searchsorted sort sum tril triu unique_consecutive unique_dim zeros_like
    """.split()
)
"""Ops whose results have no more elements than about all of their arguments together."""

_len_modes = torch._C._len_torch_dispatch_stack


class KnownValues:
    """What one trace knows.

    made: whether a storage was made inside the trace.
    """

    def __init__(self, made: Callable[[Storage], bool]) -> None:
        self._made = made
        # of storages, by identity, for as long as they hold the same array
        self._twins: dict[int, tuple[jax.Array, torch.Tensor]] = {}

    def result(self, func: Any, kernel: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """What the call gives, if that is known: Tensors with arrays that are no tracers, or Python values. Else MISS."""
        bound = _bound(func)
        if bound is None or kernel.__class__ is DecliningKernel or _len_modes():
            return MISS
        twins = self._twins_of(args, kwargs or {})
        if twins is None:
            return MISS
        tensors, values, names = twins
        if not tensors and not _is_small_factory(func, values, names):
            return MISS
        if tensors and bound(tensors, values) > _LARGEST:
            return MISS
        goal = torch.device((kwargs or {}).get("device") or DEVICE_TYPE).type
        if goal not in (DEVICE_TYPE, "cpu"):
            return MISS
        return _here(func(*values, **names), goal == "cpu")

    def twin(self, tensor: Tensor) -> torch.Tensor | None:
        """The values of a Tensor on the CPU, with its strides, not to be written to; None if they are not known."""
        aval, store = tensor._aval, tensor._store
        array = store.array
        if aval.dtype not in _EXACT or is_traced(array) or array.size > _LARGEST or not self._made(store):
            return None
        known, base = self._twins.get(id(store), (None, None))
        if known is not array or base is None:
            base = torch_from_array(array)
            if base.stride() != store.stride:
                base = torch.empty_strided(base.shape, store.stride, dtype=base.dtype).copy_(base)
            self._twins[id(store)] = (array, base)
        if base.dtype != aval.dtype:  # a view that takes the bytes for another type's
            return None
        if tensor.__class__ is View:
            return base.as_strided(aval.shape, aval.stride, tensor.storage_offset())
        return base

    def _twins_of(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[Any], dict[str, Any]] | None:
        """The tensors among the arguments, and the arguments, all of them known and on the CPU; None if one is not."""
        tensors: list[torch.Tensor] = []

        def known(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                found = self.twin(value) if isinstance(value, Tensor) else _plain(value)
                if found is None:
                    raise _Unknown
                tensors.append(found)
                return found
            if value.__class__ is list or value.__class__ is tuple:
                return [known(item) for item in value]
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise _Unknown
            return value

        try:
            values = [known(a) for a in args]
            names = {name: known(a) for name, a in kwargs.items()}
        except _Unknown:
            return None
        if "device" in names:
            names["device"] = torch.device("cpu")
        return tensors, values, names


class _Unknown(Exception):
    """A tensor among the arguments has no known values."""


def _plain(value: torch.Tensor) -> torch.Tensor | None:
    """A CPU tensor among the arguments, if it is one that mixes with tensors of ours, a number, of an exact type."""
    plain = value.__class__ is torch.Tensor and value.device.type == "cpu" and not value.dim()
    return value if plain and value.dtype in _EXACT else None


@functools.cache
def _bound(func: Any) -> Callable[[list[torch.Tensor], list[Any]], int] | None:
    """What tells, of a call's tensors and of its arguments, how many elements its result has at most; None for an op that is
    not computed here."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if schema.is_mutable or any(a.alias_info is not None for a in [*schema.arguments, *schema.returns]):
        return None
    if torch.Tag.pointwise in func.tags:
        return _broadcast
    if name in _NO_LARGER or name in _FACTORIES:
        return lambda tensors, values: sum(t.numel() for t in tensors)
    if name in ("new_full", "new_ones", "new_zeros"):
        return lambda tensors, values: math.prod(values[1])
    if name in ("index", "index_select"):
        return lambda tensors, values: tensors[0].numel() * sum(t.numel() for t in tensors[1:])
    if name == "constant_pad_nd":
        return lambda tensors, values: _padded(tensors[0].shape, values[1])
    if name == "repeat":
        return lambda tensors, values: tensors[0].numel() * math.prod(values[1])
    return None


def _broadcast(tensors: list[torch.Tensor], values: list[Any]) -> int:
    try:
        return math.prod(torch.broadcast_shapes(*(t.shape for t in tensors)))
    except RuntimeError:  # the op has words of its own for it
        return _LARGEST + 1


def _padded(shape: Sequence[int], pad: Sequence[int]) -> int:
    """Elements of a tensor padded by (before, after) of its last dim, of the one before it, and so on."""
    sizes = [*reversed(shape)]
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=False)):
        if dim < len(sizes):
            sizes[dim] += before + after
    return math.prod(sizes)


def _is_small_factory(func: Any, values: list[Any], names: dict[str, Any]) -> bool:
    """Whether a call without tensors makes few exact numbers."""
    name = func._schema.name.partition("::")[2]
    if name not in _FACTORIES or names.get("layout") not in (None, torch.strided):
        return False
    if any(isinstance(v, complex) for v in values):
        return False
    numbers = [v for v in values if isinstance(v, (bool, int, float))]
    dtype = names.get("dtype")
    if dtype is None:  # of whole numbers arange and full make integers, and the others what torch's default says
        if name in ("ones", "zeros") or any(isinstance(n, float) for n in numbers):
            return False
    elif dtype not in _EXACT:
        return False
    if name == "arange":
        ends, step = numbers[:2], numbers[2:]
        return bool(ends) and all(abs(n) <= _LARGEST for n in ends) and 0 not in step
    if name in ("tril_indices", "triu_indices"):
        return 2 * numbers[0] * numbers[1] <= _LARGEST
    return not values or not isinstance(values[0], list) or 0 <= math.prod(values[0]) <= _LARGEST


def _here(result: Any, moved: bool) -> Any:
    """Results of CPU torch as Tensors of ours, unless they were to go to the CPU; MISS if one is not of an exact type."""
    if isinstance(result, torch.Tensor):
        if moved:
            return result.clone()
        if result.dtype not in _EXACT or result.numel() > _LARGEST:
            return MISS
        return make_tensor(array_from_torch(result), Aval.of(tuple(result.shape), tuple(result.stride()), result.dtype))
    if isinstance(result, (list, tuple)):
        items = [_here(item, moved) for item in result]
        return MISS if any(item is MISS for item in items) else type(result)(items)
    return result
