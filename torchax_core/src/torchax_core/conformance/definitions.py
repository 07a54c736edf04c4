"""Who defined what a failing sample ran: the ops that reached the device, and the file and line of each."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchax_core.environment import current_env
from torchax_core.tensor import active
from torchax_core.variants import op_name

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = ["definitions_of", "guess", "recorded"]

_MOST = 12
_PLUMBING = {"aten::_to_copy", "aten::detach", "aten::copy_", "aten::empty.memory_format", "aten::empty_strided"}


class _Recorder:
    """A look-up from op to kernel that notes what it is asked for."""

    def __init__(self, kernels: Any, seen: dict[Any, None]) -> None:
        self.kernels, self.seen = kernels, seen

    def get(self, func: Any) -> Any:
        self.seen[func] = None
        return self.kernels.get(func)


@contextlib.contextmanager
def recorded() -> Iterator[dict[Any, None]]:
    """The ops that reach the device in the block, in order of their first call, backward's included."""
    seen: dict[Any, None] = {}
    environment = current_env()
    recorder = _Recorder(environment._lookup(), seen)
    before = active.kernels
    with unittest.mock.patch.object(environment, "_lookup", lambda: recorder):
        active.kernels = recorder
        try:
            yield seen
        finally:
            active.kernels = before


def definitions_of(ops: Any) -> list[str]:
    """ "aten::exp  pack/pointwise.py:12" for each op, without those that only move tensors; at most a dozen."""
    lines = []
    for func in ops:
        explanation = current_env().explain(func)
        if explanation.op not in _PLUMBING:
            lines.append(f"{explanation.op}  {explanation.source or 'nobody defines it'}")
    return lines[:_MOST]


def guess(op: OpInfo) -> list[str]:
    """The same for the ops that `op` is probably about, when the process in which it ran is gone."""
    packets = [getattr(torch.ops.aten, name, None) for name in dict.fromkeys((op.aten_name, op.name)) if name]
    every = set(torch._C._dispatch_get_all_op_names())  # TorchScript has overloads of its own
    funcs = [getattr(p, overload) for p in packets if p is not None for overload in p.overloads()]
    return definitions_of([func for func in funcs if op_name(func) in every])
