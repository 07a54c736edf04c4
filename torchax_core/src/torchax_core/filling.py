"""Tensors of one number, put onto the device as they are: XLA would make a program for each shape there is.

An optimizer's first step makes two for each of a model's weights.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding

from torchax_core.convert import array_from_numpy
from torchax_core.dtypes import jax_dtype
from torchax_core.tensor import Aval, Tensor, make_tensor

__all__ = ["Filling"]

_aten = torch.ops.aten
_NUMBERS: dict[Any, Callable[..., Any]] = {
    _aten.zeros_like.default: lambda: 0,
    _aten.ones_like.default: lambda: 1,
    _aten.full_like.default: lambda fill_value: fill_value,
}


class Filling:
    """A look-up from op to kernel, with `zeros_like` and its kin by hand. kernels: the one for all others."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def get(self, func: Any) -> Any:
        """As dict.get."""
        kernel, number = self._kernels.get(func), _NUMBERS.get(func)
        return kernel if number is None or kernel is None else functools.partial(_fill, kernel, number)


def _fill(kernel: Any, number: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    like, *rest = args
    settings = {name: value for name, value in (kwargs or {}).items() if value and name != "device"}
    plain = settings in ({}, {"memory_format": torch.preserve_format}) and isinstance(like, Tensor)
    if not plain or any(isinstance(value, torch.Tensor) for value in rest):
        return kernel(args, kwargs)
    array, shape = like._store.array, tuple(like.shape)
    # a view, of another shape or dtype, need not lie as its storage does
    sharding = array.sharding if like.__class__ is Tensor else SingleDeviceSharding(min(array.devices(), key=_number))
    value = np.asarray(number(*rest)).astype(jax_dtype(like.dtype))

    def part(index: Any) -> Any:
        sizes = [len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True)]
        return np.zeros(sizes, value.dtype) if not value else np.full(sizes, value)

    if array.committed:
        with jax.enable_x64(True):
            made = jax.make_array_from_callback(shape, sharding, part)
    else:  # what lies on no device by choice may yet go with what does
        made = array_from_numpy(part(tuple(slice(n) for n in shape)))
    return make_tensor(made, Aval.of(shape, torch.empty_like(like._aval.meta()).stride(), like.dtype))


_number = operator.attrgetter("id")
