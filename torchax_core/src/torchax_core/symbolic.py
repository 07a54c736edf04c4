"""Numbers known only when a traced program runs, in the places where torch insists on a Python number.

`x.add_(y, alpha=t)` with a 0-d tensor `t` makes torch ask `t` for its value, through C++. Under a trace the answer is a
`torch.SymFloat` whose node holds the traced array: it passes through torch's dispatcher untouched and comes out in the
kernel of `add_`, which takes the array. Arithmetic on it, as in `1 - beta ** step`, is traced. Anything that would need its
value in Python raises DataDependentError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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

    def wrap_int(self, value: int) -> _Node:
        return _node_of_number(value, jnp.int64)

    def wrap_float(self, value: float) -> _Node:
        return _node_of_number(value, jnp.float64)

    def wrap_bool(self, value: bool) -> _Node:
        return _node_of_number(value, jnp.bool_)

    def sym_float(self) -> _Node:
        with jax.enable_x64(True):
            return _node_of_array(self.array.astype(jnp.float64))

    def expect_true(self, file: Any, line: Any) -> bool:
        """Asked by `torch._check`, which torch's own arithmetic uses (a power's base is not negative): taken as true."""
        return True

    def __getattr__(self, name: Any) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DataDependentError(
            f"`{name}` was asked of the value of a traced 0-d tensor ({self.array.dtype}), which is known only when the "
            f"program runs. {_WAYS_OUT}"
        )


def _node_of_array(array: jax.Array) -> _Node:
    if array.dtype == bool:
        return _Node(array, "bool")
    return _Node(array, "int" if jnp.issubdtype(array.dtype, jnp.integer) else "float")


def _node_of_number(value: Any, dtype: Any) -> _Node:
    with jax.enable_x64(True):
        return _node_of_array(jnp.asarray(value, dtype))


def _computed(function: Callable[..., jax.Array]) -> Callable[..., _Node]:
    """A method of the node: `function` of its array and those of the other operands."""

    def method(self: _Node, *others: _Node) -> _Node:
        with jax.enable_x64(True):
            return _node_of_array(function(self.array, *[other.array for other in others]))

    return method


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.astype(jnp.float64) / b.astype(jnp.float64)


# What torch.SymFloat and SymInt ask of their nodes (torch.fx.experimental.sym_node), as Python computes it.
_METHODS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "float_truediv": _quotient,
    "int_truediv": _quotient,
    "int_floordiv": jnp.floor_divide,
    "mod": jnp.mod,
    "float_pow": jnp.power,
    "neg": jnp.negative,
    "pos": jnp.positive,
    "abs": jnp.abs,
    "sym_min": jnp.minimum,
    "sym_max": jnp.maximum,
    "sym_not": jnp.logical_not,
    **{name: getattr(jnp, long) for name, long in [("eq", "equal"), ("ne", "not_equal")]},
    **{name: getattr(jnp, long) for name, long in [("lt", "less"), ("le", "less_equal")]},
    **{name: getattr(jnp, long) for name, long in [("gt", "greater"), ("ge", "greater_equal")]},
    **{f"sym_{name}": getattr(jnp, name) for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "log2")},
}
for _name, _function in _METHODS.items():
    setattr(_Node, _name, _computed(_function))


def symbol_of_array(array: jax.Array) -> Any:
    """A torch symbol that carries a traced 0-d array through torch's dispatcher."""
    node = _node_of_array(array)
    symbol = {"bool": torch.SymBool, "int": torch.SymInt, "float": torch.SymFloat}[node.kind]
    return symbol(node)  # type: ignore[arg-type]


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
