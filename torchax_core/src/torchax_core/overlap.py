"""What torch refuses of tensors to be written to that share memory, with themselves or with what is read.

Here such calls would have a defined result, as everything is read before anything is written; but code that relies on it
fails on every other device. Each op has rules of its own, so CPU torch is asked, on zeros in the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchax_core.templates import leaves_of
from torchax_core.tensor import Storage, Tensor

__all__ = ["check_elements_apart", "check_shared_memory"]

_CPU_ELEMENTS = 1 << 24  # calls on more are not tried


def check_elements_apart(shape: Sequence[int], stride: Sequence[int]) -> None:
    """Raise, as torch does, for a tensor to be written to that has several elements in one place (an expanded one)."""
    if 0 not in shape and any(n > 1 and step == 0 for n, step in zip(shape, stride, strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def check_shared_memory(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Any], seen: set[Any]
) -> None:
    """Raise what CPU torch raises for a call that writes to memory which another argument reads: of `out=`, or in place.

    outs: the tensors to be written to, which are among the arguments.
    seen: calls that are known to be well, by the geometry of their tensors; this one is added.
    """
    stores = {id(t._store) for t in outs if isinstance(t, Tensor)}
    tensors = [t for t in leaves_of([*args, *kwargs.values()]) if isinstance(t, Tensor)]
    if sum(id(t._store) in stores for t in tensors) <= len(outs):
        return
    order: dict[int, int] = {}
    key = tuple(
        (t._aval, t.storage_offset(), order.setdefault(id(t._store), len(order)), any(t is out for out in outs))
        for t in tensors
    )
    if key in seen:
        return
    reinterpreted = any(
        t._store.array.dtype != t._aval.jax_dtype for t in tensors
    )  # they read the bits as another dtype
    if not reinterpreted and sum(t._store.array.size for t in tensors) <= _CPU_ELEMENTS:
        error = _error_on_cpu(func, args, kwargs, shared=True)
        if error is not None and _error_on_cpu(func, args, kwargs, shared=False) is None:
            raise error from None
    seen.add(key)


def _error_on_cpu(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, shared: bool
) -> Exception | None:
    memories: dict[int, torch.Tensor] = {}

    def memory(store: Storage, dtype: torch.dtype) -> torch.Tensor:
        if shared and id(store) in memories:
            return memories[id(store)]
        return memories.setdefault(id(store) if shared else len(memories), torch.zeros(store.array.size, dtype=dtype))

    made: dict[int, torch.Tensor] = {}

    def on_cpu(x: Any) -> Any:
        if isinstance(x, Tensor):
            if shared and id(x) in made:
                return made[id(x)]  # a tensor given twice is one: resized as output, it is as input
            made[id(x)] = memory(x._store, x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
            return made[id(x)]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*pytree.tree_map(on_cpu, tuple(args)), **pytree.tree_map(on_cpu, kwargs))
    except Exception as error:
        return error
    return None
