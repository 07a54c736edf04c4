"""`stablehlo.composite` for programs of any shape: an op under its name, with its decomposition as a function beside it.

`jax.lax.composite` (jax 0.10) names a function that takes the module's dimension variables and platform index as well, which
StableHLO refuses. Here that function gets another around it, which takes the arguments alone and reads sizes off them. Where
a size cannot be read off, the decomposition is called, without a composite.

XLA makes a module of dynamic shapes static before it compiles it, and that pass (jaxlib 0.10) knows no composites: it makes the
arguments' types static and not the decomposition's. So such modules are for other compilers to read; JAX runs one without.
Source: https://openxla.org/stablehlo/spec#composite
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func as func_dialect
from jaxlib.mlir.dialects import stablehlo

__all__ = ["composite"]

_composite_p = jec.Primitive("torchax_composite")
_composite_p.multiple_results = True


def composite(body: Callable[..., Sequence[Any]], name: str, arrays: Sequence[Any], attributes: dict[str, Any]) -> Any:
    """`body(*arrays)`, a sequence of arrays, as a composite of that name. Under jax.grad and jax.vmap it is what `body` is.

    attributes: bools, numbers and strings by name, for those who know the op.
    """
    jaxpr = jax.make_jaxpr(lambda *xs: tuple(body(*xs)))(*[jax.typeof(a) for a in arrays])
    return _composite_p.bind(*arrays, name=name, attributes=tuple(attributes.items()), jaxpr=jaxpr)


def _run(*arrays: Any, jaxpr: Any, **_: Any) -> Any:
    return jec.jaxpr_as_fun(jaxpr)(*arrays)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, **_: Any) -> Any:
    moving = [i for i, p in enumerate(primals) if jnp.issubdtype(p.dtype, jnp.inexact)]

    def of_moving(*chosen: Any) -> Any:
        full = list(primals)
        for i, array in zip(moving, chosen, strict=True):
            full[i] = array
        return tuple(_run(*full, jaxpr=jaxpr))

    given = [ad.instantiate_zeros(tangents[i]) for i in moving]
    return jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(given))


def _batched(arrays: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any, **_: Any) -> Any:
    results = jax.vmap(lambda *xs: tuple(_run(*xs, jaxpr=jaxpr)), in_axes=tuple(dims))(*arrays)
    return results, [0] * len(results)


def _lower(ctx: Any, *args: Any, name: str, attributes: Any, jaxpr: Any) -> Any:
    module = ctx.module_context
    body = mlir.lower_jaxpr_to_fun(module, name, jaxpr, [], num_const_args=0, in_avals=ctx.avals_in)
    inputs = list(body.arguments)
    if len(inputs) > len(args):
        sizes = _sizes(module, inputs, ctx.avals_in)
        if sizes is None:
            return _call(body, [*ctx.dim_var_values, *args])
        body = _of_arguments_alone(module, name, body, sizes, [a.type for a in args])
    return stablehlo.CompositeOp(
        list(body.type.results),
        list(args),
        name=ir.StringAttr.get(name),
        decomposition=ir.FlatSymbolRefAttr.get(body.name.value),
        composite_attributes=ir.DictAttr.get({k: mlir.ir_attribute(v) for k, v in attributes}),
        version=mlir.i32_attr(0),
    ).results


def _call(body: Any, operands: Sequence[Any]) -> Any:
    return func_dialect.CallOp(
        list(body.type.results), ir.FlatSymbolRefAttr.get(body.name.value), list(operands)
    ).results


def _sizes(module: Any, inputs: Sequence[Any], avals: Sequence[Any]) -> list[Any] | None:
    """For each dimension variable: the argument and dimension that has its value, None if the body does not use it. None if
    there is one that no argument has."""
    found: list[Any] = []
    for variable, value in zip(module.shape_poly_state.dim_vars, inputs, strict=False):
        places = [(i, d) for i, aval in enumerate(avals) for d, n in enumerate(aval.shape) if str(n) == variable]
        if places:
            found.append(places[0])
        elif _is_used(value, module):
            return None
        else:
            found.append(None)
    return found


def _is_used(value: Any, module: Any) -> bool:
    """Whether a function computes with this input of its, or hands it to one that does."""
    for use in value.uses:
        op = use.owner.operation if hasattr(use.owner, "operation") else use.owner
        if op.name != "func.call":
            return True
        callee = module.symbol_table[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        if _is_used(callee.arguments[use.operand_number], module):
            return True
    return False


def _of_arguments_alone(module: Any, name: str, body: Any, sizes: Sequence[Any], types: Sequence[Any]) -> Any:
    """A function of the arguments, which works the sizes out and calls the body with them."""
    with ir.InsertionPoint(module.module.body), ir.Location.unknown():
        outer = func_dialect.FuncOp(name, ir.FunctionType.get(list(types), list(body.type.results)))
        outer.attributes["sym_visibility"] = ir.StringAttr.get("private")
        module.symbol_table.insert(outer)
        block = outer.add_entry_block()
        with ir.InsertionPoint(block):
            operands = [
                _size(block.arguments, place, value.type) for place, value in zip(sizes, body.arguments, strict=False)
            ]
            func_dialect.ReturnOp(_call(body, [*operands, *block.arguments]))
    return outer


def _size(arguments: Any, place: Any, kind: Any) -> Any:
    if place is None:
        dtype = np.int64 if "i64" in str(kind) else np.int32
        return mlir.ir_constant(np.zeros((), dtype))
    argument, dimension = place
    size = stablehlo.GetDimensionSizeOp(arguments[argument], mlir.i64_attr(dimension)).result
    return size if size.type == kind else stablehlo.ConvertOp(kind, size).result


_composite_p.def_impl(_run)
_composite_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[_composite_p] = _jvp
batching.primitive_batchers[_composite_p] = _batched
mlir.register_lowering(_composite_p, _lower)
