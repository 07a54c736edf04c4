"""Recurrent layers on meta tensors, over two time steps in place of all: torch goes through them one by one in Python.

What torch checks, and the shapes and strides of the results, do not depend on how many there are; a sequence of 4,096
would take it ten seconds.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html, .GRU.html, .RNN.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Shortened", "shortened"]

_LAYERS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_STEPS = 2  # of one, strides would say nothing


@dataclasses.dataclass(frozen=True)
class Shortened:
    """The arguments of a call over `_STEPS` steps, and what makes the first result as long as the whole call's."""

    metas: dict[str, Any]
    lengthen: Callable[[torch.Tensor], torch.Tensor]

    def results(self, results: Any) -> Any:
        """The whole call's, of what the short one returned: (output, states...)."""
        output, *states = results
        return (self.lengthen(output), *states)


def shortened(func: Any, metas: dict[str, Any]) -> Shortened | None:
    """The call cut to `_STEPS` steps; None for other ops and for calls that are no longer than that.

    metas: the arguments by name. `input` is (steps, batch, size), with `batch_first` (batch, steps, size); packed, `data`
           is (rows, size) and `batch_sizes` says how many of the rows are of each step.
    """
    overload = func._schema.overload_name
    if func._schema.name.removeprefix("aten::") not in _LAYERS:
        return None
    if overload == "input":
        dim, x = int(metas["batch_first"]), metas["input"]
        if x.dim() != 3 or not isinstance(x.shape[dim], int) or x.shape[dim] <= _STEPS:
            return None
        return _along(dim, x.shape[dim], metas | {"input": x.narrow(dim, 0, _STEPS)})
    if overload == "data":
        x, sizes = metas["data"], metas["batch_sizes"]
        if sizes.device.type != "cpu" or sizes.dim() != 1 or len(sizes) <= _STEPS or x.dim() != 2:
            return None
        rows = int(sizes[:_STEPS].sum())
        return _along(0, x.shape[0], metas | {"data": x.narrow(0, 0, rows), "batch_sizes": sizes[:_STEPS]})
    return None


def _along(dim: int, length: int, metas: dict[str, Any]) -> Shortened:
    def lengthen(output: torch.Tensor) -> torch.Tensor:
        shape = (*output.shape[:dim], length, *output.shape[dim + 1 :])
        return output.new_empty_strided(shape, output.stride())

    return Shortened(metas, lengthen)
