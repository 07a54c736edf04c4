"""The NaN check: an op whose result has NaN (or inf) where no input had raises, with its name and the user's line.

A jitted function runs as it is, and what it returned and wrote is looked at; on a find, its state is put back and it is run
again, op by op, to find the op: as jax_debug_nans does.
Source: https://docs.jax.dev/en/latest/debugging/flags.html#jax-debug-nans-configuration-option-and-context-manager
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchax_core.convert import is_traced, zeros_array
from torchax_core.errors import NonFiniteError
from torchax_core.log import describe
from torchax_core.tensor import Storage, Tensor
from torchax_core.trace import get_grad, set_grad
from torchax_core.view import View
from torchax_core.watching import Call, Check, Watch

__all__ = ["NonFiniteCheck", "run_checked"]


class NonFiniteCheck(Check):
    """Raises NonFiniteError for NaN, inf or both that a call makes of inputs that have none."""

    jitted = "checked"

    def __init__(self, *, nans: bool = True, infs: bool = False) -> None:
        self.nans = nans
        self.infs = infs

    def before(self, call: Call) -> list[Any]:
        """The arrays of the inputs; held, so that the call does not donate them."""
        arrays = []
        for tensor in call.tensors():
            array = tensor._store.array
            if isinstance(tensor, View) and not tensor._is_read():
                array = functools.partial(tensor._path.read, array, tensor._offsets)
            arrays.append(array)
        return arrays

    def after(self, call: Call, before: list[Any], result: Any) -> None:
        """Look at what was returned and written; if there is something, at the inputs."""
        schema = getattr(call.func, "_schema", None)
        written = list(call.tensors()) if schema is None or schema.is_mutable else []
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns):
            return  # views: no new values
        arrays = {id(t._store): t._store.array for t in results + written}.values()
        found = self.found(arrays)
        if found and not self.found(a() if callable(a) else a for a in before) and not self._among_numbers(call):
            raise NonFiniteError(
                f"{call.name} made {found} {call.line}\n  inputs, all without: {call.described()}\n  result: {describe(result)}"
            )

    def in_backward(self, call: Call, before: list[Any], given: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Look at the gradients, and if there is something, at what they were made of."""
        found = self.found(g._store.array for g in gradients if g is not None)
        arrays = [g._store.array for g in given if g is not None] + [a() if callable(a) else a for a in before]
        if found and not self.found(arrays):
            raise NonFiniteError(
                f"{call.name} made {found} {call.line}\n  inputs, all without: {call.described()}\n"
                f"  gradients: {describe(list(gradients))}"
            )

    def found(self, arrays: Iterable[Any]) -> str:
        """What is among the arrays: "NaN", "inf", or nothing."""
        for array in arrays:
            if not jnp.issubdtype(array.dtype, jnp.inexact) or is_traced(array) or array.is_deleted():
                continue
            if self.nans and _any(array, "isnan"):
                return "NaN"
            if self.infs and _any(array, "isinf"):
                return "inf"
        return ""

    def _among_numbers(self, call: Call) -> bool:
        """Whether a number among the arguments is what is looked for: fill_(nan), masked_fill(mask, -inf)."""
        numbers = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, (float, complex))]
        numbers += [x for z in numbers for x in (z.real, z.imag)]
        for tensor in pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, Tensor) and tensor.is_cpu:
                if self.nans and bool(tensor.isnan().any()) or self.infs and bool(tensor.isinf().any()):
                    return True
        parts = [x for x in numbers if isinstance(x, float)]
        return any(self.nans and math.isnan(x) or self.infs and math.isinf(x) for x in parts)


def _any(array: jax.Array, what: str) -> bool:
    """Whether any element isnan or isinf: looked at in place on CPU, which compiles nothing, else by the device."""
    if array.is_fully_addressable and len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu":
        return bool(getattr(np, what)(np.asarray(array)).any())
    return bool(_on_device(array, what))


@functools.partial(jax.jit, static_argnums=1)
def _on_device(array: jax.Array, what: str) -> jax.Array:
    return getattr(jnp, what)(array).any()


# -- jitted functions --------------------------------------------------------------------------------


class _Before:
    """All that a jitted function may change, as it was before the call; held, so that nothing is donated."""

    def __init__(self, program: Any, leaves: Sequence[Any]) -> None:
        stores = [*program.captured, *(t._store for t in leaves if isinstance(t, Tensor))]
        grads = [*program.gradients.cleared, *program.gradients.tensors] + [
            t for t in leaves if isinstance(t, torch.Tensor)
        ]
        self.grads = [(tensor, get_grad(tensor)) for tensor in grads if tensor.is_leaf]
        stores += [grad._store for _, grad in self.grads if isinstance(grad, Tensor)]
        self.arrays: dict[int, tuple[Storage, Any]] = {id(s): (s, s.array) for s in stores if not is_traced(s.array)}
        born = [store for store in (reference() for reference, _ in program.born) if store is not None]
        self.born = [store for store in born if id(store) not in self.arrays]
        self.random = program.environment.random
        self.count = self.random.count

    def restore(self) -> None:
        for store, array in self.arrays.values():
            if store.array is not array:
                store.write(array)
        for store in self.born:  # made by the first call itself: what optimizers start from
            store.write(zeros_array(store.array.shape, store.array.dtype))
        for tensor, grad in self.grads:
            set_grad(tensor, grad)
        self.random.count = self.count


def run_checked(watch: Watch, call: Call, program: Any, leaves: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run a jitted function; if something is found in what it made, put all back and run it op by op to find the op."""
    checks = [check for check in watch.checks if isinstance(check, NonFiniteCheck)]
    before = _Before(program, leaves)
    result = run()
    arrays = [t._store.array for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    arrays += [store.array for store, _ in before.arrays.values()]
    arrays += [get_grad(t)._store.array for t, _ in before.grads if isinstance(get_grad(t), Tensor)]  # type: ignore[union-attr]
    arrays += [store.array for store in before.born]
    inputs = [array for _, array in before.arrays.values()]
    found = next(
        (what for check in checks if (what := check.found(arrays)) and not check.found(inputs)),
        "",
    )
    if not found:
        return result
    before.restore()
    try:
        watch.run_eagerly(call.func.fn, call.args, call.kwargs)
    finally:
        before.restore()
    raise NonFiniteError(
        f"{call.name} made {found} {call.line}, but none of its ops does so when they run one by one: the program computes in "
        "another order than they do, or what the function does depends on what Python has kept since it was traced. Its "
        "state is as it was before the call."
    )
