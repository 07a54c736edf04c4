"""Numbers known only when a traced program runs, in the places where torch insists on a Python number.

`x.add_(y, alpha=t)` with a 0-d tensor `t` makes torch ask `t` for its value, through C++. Under a trace the answer is a
`torch.SymFloat` whose node holds the traced array: it passes through torch's dispatcher untouched and comes out in the
kernel of `add_`, which takes the array. Anything that would need its value in Python raises DataDependentError.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from torchax_core.errors import DataDependentError

__all__ = ["array_of_symbol", "symbol_of_array"]

_WAYS_OUT = (
    "Three ways out: compute with tensors (`torch.where(cond, a, b)` instead of `if`); move this line out of the jitted "
    "function; or, if the value never changes, read it before the function is traced and pass it in as a Python number."
)


class _Node:
    """The side of a torch.SymFloat/SymInt/SymBool that torch's C++ talks to."""

    def __init__(self, array: jax.Array, kind: str) -> None:
        self.array = array
        self.kind = kind

    def is_int(self) -> bool:
        return self.kind == "int"

    def is_float(self) -> bool:
        return self.kind == "float"

    def is_bool(self) -> bool:
        return self.kind == "bool"

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def nested_int(self) -> None:
        return None

    def str(self) -> str:
        return f"<traced {self.array.dtype}>"

    _graph_repr = str

    def __getattr__(self, name: Any) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DataDependentError(
            f"`{name}` was asked of the value of a traced 0-d tensor ({self.array.dtype}), which is known only when the "
            f"program runs. {_WAYS_OUT}"
        )


def symbol_of_array(array: jax.Array) -> Any:
    """A torch symbol that carries a traced 0-d array through torch's dispatcher."""
    if array.dtype == bool:
        return torch.SymBool(_Node(array, "bool"))
    if jax.numpy.issubdtype(array.dtype, jax.numpy.integer):
        return torch.SymInt(_Node(array, "int"))
    return torch.SymFloat(_Node(array, "float"))


def array_of_symbol(symbol: Any) -> jax.Array:
    """The traced array a symbol of :func:`symbol_of_array` carries. TypeError for anything else."""
    node = getattr(symbol, "node", None)
    if isinstance(node, _Node):
        return node.array
    raise TypeError(
        f"expected a tensor or a number for an op on device 'jax', but got {symbol!r} of type {type(symbol).__name__}."
    )


def control_flow_error(what: str, array: Any) -> DataDependentError:
    """The error for a Python value asked of a traced tensor by the user's own code; names the user's line."""
    import traceback

    here = next(
        (
            f" at {frame.filename}:{frame.lineno} (`{frame.line}`)"
            for frame in reversed(traceback.extract_stack())
            if not any(part in frame.filename for part in ("/torchax_core/", "/torch/", "/jax/", "/jaxlib/"))
        ),
        "",
    )
    return DataDependentError(
        f"{what}{here} asks for the value of a traced tensor ({array.aval}), which is known only when the program runs. "
        f"{_WAYS_OUT}"
    )
