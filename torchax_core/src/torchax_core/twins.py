"""A call as CPU torch runs it: on twins of its tensors, with the same values, strides and sharing.

Tensors that share a storage have twins that share one, so what an op writes through a view is seen in the twin's base.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchax_core.convert import torch_from_array
from torchax_core.device import DEVICE_TYPE
from torchax_core.tensor import Storage, Tensor, wrap_array
from torchax_core.view import View
from torchax_core.watching import Call

__all__ = ["TIES", "TwinCall", "Twins", "base_name", "values_of", "widened"]

TIES = re.compile(r"(^|_)(sort|topk|argsort|kthvalue|median|nanmedian|mode|msort)($|_)")
"""Ops whose indices are of any one among equal elements."""
_CPU_LACKS = re.compile(
    r"not implemented|not (currently )?support|unsupported|Could not run|only supported|not available"
)
_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDE |= {torch.complex64: torch.complex128}


def values_of(tensor: Tensor) -> torch.Tensor:
    """A CPU tensor of the present values. A view is read without being marked as read, which would change how it runs."""
    if isinstance(tensor, View) and not tensor._is_read():
        return torch_from_array(tensor._path.read(tensor._store.array, tensor._offsets))
    return torch_from_array(tensor._array())


@dataclasses.dataclass
class _Base:
    """A storage, the array it held, and that array's twin: in memory as torch would have it."""

    store: Storage
    array: jax.Array
    twin: torch.Tensor
    shared: bool = True  # every twin over it is a window on its memory


class Twins:
    """The twins of a call's tensors.

    pairs:  each tensor among the arguments, with its twin.
    stores: the storage each of them had; None for one that is no tensor of ours.
    bases:  the storages by identity, with their twins.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.stores: list[Storage | None] = []
        self.bases: dict[int, _Base] = {}

    def of(self, value: Any) -> Any:
        """`value` (nested lists, tuples and dicts of arguments) with twins in the place of tensors."""
        if isinstance(value, Tensor):
            found = self._twin(value)
            self.pairs.append((value, found))
            self.stores.append(value._store)
            return found
        if isinstance(value, torch.Tensor):  # a 0-d CPU tensor, CPU indices, the target of a copy off the device
            found = value.detach().clone()
            self.pairs.append((value, found))
            self.stores.append(None)
            return found
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == DEVICE_TYPE else value
        if isinstance(value, dict):
            return {k: self.of(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if value.__class__ in (list, tuple):
            return type(value)(map(self.of, value))
        return value

    def _twin(self, tensor: Tensor) -> torch.Tensor:
        store = tensor._store
        base = self.bases.get(id(store))
        if base is None:
            dense = torch_from_array(store.array)
            if dense.stride() != tuple(store.stride):
                dense = torch.empty_strided(dense.shape, store.stride, dtype=dense.dtype).copy_(dense)
            base = self.bases[id(store)] = _Base(store, store.array, dense)
        if isinstance(tensor, View) and any(s.rules is not None and s.rules.bit for s in tensor._path.steps):
            base.shared = False  # conj and neg bits: not what lies in memory
            return values_of(tensor)
        twin = torch.empty(0, dtype=tensor.dtype)
        memory = base.twin.untyped_storage()
        return twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def widened(value: Any) -> Any:
    """A copy of arguments with their tensors in double precision, for the truth of a result."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value.clone()
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    if value.__class__ in (list, tuple):
        return type(value)(map(widened, value))
    return value


# -- the twin of a call ----------------------------------------------------------------------------


class TwinCall:
    """One call as CPU torch runs it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.func = _ELSEWHERE.get(call.name, call.func)
        self.twins = Twins()
        self.args = self.twins.of(call.args)
        self.kwargs = self.twins.of(call.kwargs)
        self.mutable = getattr(getattr(call.func, "_schema", None), "is_mutable", True)
        tensors = [tensor for tensor, _ in self.twins.pairs]
        self.wants = [t.requires_grad and (t.dtype.is_floating_point or t.dtype.is_complex) for t in tensors]
        self._pristine = self._widened() if self.mutable else None  # CPU torch will write to the twins
        self._truth: dict[str, list[Any]] | None = None

    def _widened(self) -> tuple[Any, Any]:
        return widened(self.args), widened(self.kwargs)

    def run(self) -> Any:
        """CPU torch's result; an exception that it raises; or the reason to pass the call over."""
        try:
            result, drew = _on_cpu(lambda: self.func(*self.args, **self.kwargs))
        except NotImplementedError:
            return "CPU torch lacks the op"
        except Exception as error:
            return "CPU torch lacks the op for these arguments" if _CPU_LACKS.search(str(error)) else error
        return "random" if drew else (result,)

    def results(self, result: Any, outcome: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        """(name, ours, CPU's, place) of what the call returned and wrote."""
        seen: set[int] = set()
        ours, theirs = pytree.tree_leaves(result), pytree.tree_leaves(outcome[0])
        if len(ours) != len(theirs):
            yield "the number of results", len(ours), len(theirs), None
            return
        unsettled = bool(TIES.search(base_name(self.call.name)))
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if other is None:  # a gradient that was not asked for
                continue
            if unsettled and isinstance(other, torch.Tensor) and other.dtype is torch.int64 and len(theirs) > 1:
                continue  # which of several equal elements comes first
            seen.add(id(one))
            yield ("the result" if len(ours) == 1 else f"result {i}"), one, other, ("result", i)
        for i, ((tensor, twin), store) in enumerate(zip(self.twins.pairs, self.twins.stores, strict=True)):
            untouched = store is not None and store.array is self.twins.bases[id(store)].array
            if id(tensor) not in seen and (self.mutable or not untouched) and store is not None:
                seen.add(id(tensor))
                yield f"argument {i} after the call", tensor, twin, ("argument", i)
        for base in self.twins.bases.values():
            if base.shared and base.store.array is not base.array and base.store.array.shape == base.array.shape:
                yield "the storage written to", wrap_array(base.store.array), base.twin, None

    def truth(self, place: Any) -> Any:
        """The result or argument at `place` as computed in double precision; None if it cannot be."""
        if place is None:
            return None
        if self._truth is None:
            self._truth = {"result": [], "argument": []}
            args, kwargs = self._pristine if self._pristine is not None else self._widened()
            with contextlib.suppress(Exception):  # not every op takes every dtype
                result, _ = _on_cpu(lambda: self.func(*args, **kwargs))
                tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                self._truth = {"result": pytree.tree_leaves(result), "argument": tensors}
        kind, at = place
        found = self._truth[kind]
        return found[at] if at < len(found) else None

    def gradients(self, given: Sequence[Any], count: int) -> Any:
        """CPU autograd's gradients of the arguments that want them, given those of the results; or a reason."""
        if sum(self.wants) != count or (self.mutable and hasattr(self.func, "_schema")):
            return "gradients of something else than the arguments"
        flags = iter(self.wants)
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            copy = value.detach().clone()
            if next(flags, False):
                leaves.append(copy.requires_grad_())
            return copy

        args, kwargs = pytree.tree_map(leaf, (self.args, self.kwargs))
        cotangents = [None if g is None else values_of(g) for g in given]
        try:
            with torch.enable_grad():
                result, drew = _on_cpu(lambda: self.func(*args, **kwargs))
            if drew:
                return "random"
            outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            if len(outputs) != len(cotangents):
                return "gradients of something else than the results"
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
            if not pairs:
                return [None] * count
            return torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
        except NotImplementedError:
            return "CPU torch lacks the op's gradient"


def _on_cpu(run: Callable[[], Any]) -> tuple[Any, bool]:
    """What `run` returns, and whether it drew random numbers, which are put back."""
    state = torch.get_rng_state()
    try:
        with torch._C._DisableAutocast(), torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = run()
        return result, not torch.equal(state, torch.get_rng_state())
    finally:
        torch.set_rng_state(state)


def _linear_backward(self: Any, grad_output: Any, weight: Any, output_mask: Sequence[bool]) -> list[Any]:
    given, inputs = (t.reshape(-1, t.shape[-1]) for t in (grad_output, self))
    found = [grad_output @ weight, given.mT @ inputs, given.sum(0)]
    return [g if wanted else None for g, wanted in zip(found, output_mask, strict=True)]


def _matmul_backward(grad: Any, self: Any, other: Any, mask: Sequence[bool]) -> list[Any]:
    left = self if self.dim() > 1 else self.unsqueeze(0)
    right = other if other.dim() > 1 else other.unsqueeze(-1)
    grad = grad if self.dim() > 1 else grad.unsqueeze(-2 if other.dim() > 1 else -1)
    grad = grad if other.dim() > 1 else grad.unsqueeze(-1)
    found = [
        (grad @ right.mT).sum_to_size(left.shape).reshape(self.shape),
        (left.mT @ grad).sum_to_size(right.shape).reshape(other.shape),
    ]
    return [g if wanted else None for g, wanted in zip(found, mask, strict=True)]


_ELSEWHERE: dict[str, Any] = {"aten::linear_backward": _linear_backward, "aten::matmul_backward": _matmul_backward}
"""What torch has no CPU kernel of, by other ops."""


def base_name(name: str) -> str:
    """ "sort" of "aten::sort.stable", "interpolate" of "torch.nn.functional.interpolate"."""
    return name.partition("::")[2].partition(".")[0] if "::" in name else name.rpartition(".")[2]
