"""In-place and out= forms, derived from op schemas; none is written by hand.

An op that writes into some of its arguments has a *functional twin* that takes the same arguments, writes nothing, and
returns, after its fresh results, one new value for every argument written: `add_` and `add.out` have `add`,
`_fused_adam_` has `_fused_adam`, `normal_` has `normal_functional`. `variant_of` finds it by comparing schemas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

__all__ = ["Variant", "find_op", "is_out_argument", "op_name", "variant_of"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a writing op follows from its functional twin.

    twin:    the functional op.
    written: names of the arguments written, out= arguments first; the twin's last results are their new values.
    outs:    those of `written` that are out= arguments: the twin does not take them, and they are resized to fit.
    fresh:   how many of the twin's first results are returned as they are.
    returns: for each result of the writing op, the name of the written argument it is, or None for a fresh one.
    """

    twin: Any
    written: tuple[str, ...]
    outs: frozenset[str]
    fresh: int
    returns: tuple[str | None, ...]


def op_name(func: Any) -> str:
    """ "aten::add.Tensor", or "aten::exp" for a default overload: an op's name as packs spell it."""
    name = func._schema.name
    overload = func._schema.overload_name
    return f"{name}.{overload}" if overload else name


def find_op(name: str) -> Any | None:
    """The torch OpOverload of that name, or None if the torch installed has none."""
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return None
    return getattr(packet, overload or "default", None)


def is_out_argument(argument: Any) -> bool:
    """True for a schema argument of an out= form that receives a result."""
    return bool(argument.is_out)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@functools.cache
def variant_of(func: Any) -> Variant | None:
    """The functional twin of a writing op and how the op follows from it; None if `func` writes nothing or has no twin."""
    schema = func._schema
    written = [a for a in schema.arguments if _writes(a)]
    if not written:
        return None
    written.sort(key=lambda a: not a.is_out)  # the twin returns its results first, then new values of what it was given
    outs = frozenset(a.name for a in written if is_out_argument(a))
    inputs = [a for a in schema.arguments if a.name not in outs]
    owner: dict[str, str] = {}
    for argument in written:
        for mark in argument.alias_info.before_set:
            owner[mark] = argument.name
    returns = tuple(
        next((owner[m] for m in r.alias_info.before_set if m in owner), None) if r.alias_info is not None else None
        for r in schema.returns
    )
    fresh_types = [str(r.type) for r, name in zip(schema.returns, returns, strict=True) if name is None]
    wanted_returns = fresh_types + [str(a.type) for a in written]
    wanted_inputs = [(a.name, str(a.type)) for a in inputs]

    namespace, _, base = schema.name.partition("::")
    for packet_name in _twin_names(base):
        packet = getattr(getattr(torch.ops, namespace), packet_name, None)
        if packet is None:
            continue
        overloads = packet.overloads()
        # the overload of the same name first: where two fit, it is the one meant
        overloads = sorted(overloads, key=lambda name: name != func._overloadname)
        for overload in overloads:
            twin = getattr(packet, overload)
            if _fits(twin._schema, wanted_inputs, wanted_returns):
                return Variant(twin, tuple(a.name for a in written), outs, len(fresh_types), returns)
    return None


def _twin_names(base: str) -> list[str]:
    stem = base[:-1] if base.endswith("_") and not base.endswith("__") else base
    if base.startswith("__i") and base.endswith("__"):
        stem = "__" + base[3:]  # __ior__ -> __or__
    return [stem, f"{stem}_functional", f"{stem}_copy"]


def _fits(schema: Any, inputs: list[tuple[str, str]], returns: list[str]) -> bool:
    if any(a.alias_info is not None for a in schema.arguments):
        return False
    if [str(r.type) for r in schema.returns] != returns:
        return False
    mine = [(a.name, str(a.type)) for a in schema.arguments]
    if mine == inputs:
        return True
    # factories and *_like take dtype, layout, device besides: they come from the out tensor
    extra = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    return [m for m in mine if m[0] not in extra] == [i for i in inputs if i[0] not in extra] and len(mine) >= len(
        inputs
    )
