"""Whether a definition can be called as its op's schema says: asked when a pack is loaded, and for overrides at the first
call. What a schema says differs between versions of torch, so the error names the version installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchax_core.errors import SignatureError
from torchax_core.opset import Definition, ViewDefinition
from torchax_core.variants import find_op

__all__ = ["LEFT_OUT", "check_parameters", "check_signature"]

LEFT_OUT = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking", "generator"})
"""Schema arguments that a lowering need not take: they say where and how, not what."""


def check_signature(definition: Definition) -> None:
    """Raise SignatureError if a pack's definition does not fit; an op that the installed torch lacks is passed over."""
    if definition.kind == "function" or definition.positional:
        return
    func = find_op(definition.op)
    if func is None:
        return
    if definition.kind == "lowering":
        check_parameters(definition, func._schema)
        return
    arguments = func._schema.arguments
    if isinstance(definition, ViewDefinition):  # is given all by position
        _check_call(definition, func._schema, definition.rules.split or definition.body, arguments, [])
        return
    by_name = [a for a in arguments if a.kwarg_only and a.name not in LEFT_OUT]
    _check_call(definition, func._schema, definition.body, [a for a in arguments if not a.kwarg_only], by_name)


def check_parameters(definition: Definition, schema: Any) -> None:
    """Raise SignatureError, naming parameter, schema, file and line, if the body cannot be called with the op's arguments."""
    parameters = definition.parameters
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return
    names = [a.name for a in schema.arguments if not a.is_out]
    missing = [n for n in names if n not in parameters and n not in LEFT_OUT]
    # one body may serve several overloads: a parameter with a default need not be in each
    unknown = [
        n for n, p in parameters.items() if n not in names and n not in ("key", "random_key") and p.default is p.empty
    ]
    if missing or unknown:
        said = [f"it lacks the argument(s) {', '.join(missing)}"] if missing else []
        said += [f"it has parameter(s) {', '.join(unknown)} that the op has none of"] if unknown else []
        raise _misfit(definition, schema, f"{'; '.join(said)}. Name the parameters as the schema does.")


def _check_call(
    definition: Definition, schema: Any, body: Callable[..., Any], by_position: list[Any], by_name: list[Any]
) -> None:
    """Raise SignatureError if `body` cannot be called with these arguments of the schema. Names are its own affair where
    torch passes by position."""
    try:
        signature = inspect.signature(body)
    except ValueError:  # a builtin that does not tell
        return
    try:
        signature.bind(*by_position, **{a.name: a for a in by_name})
    except TypeError as error:
        named = ", ".join([*(a.name for a in by_position), *(f"{a.name}=" for a in by_name)])
        raise _misfit(definition, schema, f"torch calls it with ({named}): {error}.") from None


def _misfit(definition: Definition, schema: Any, what: str) -> SignatureError:
    return SignatureError(
        f"the {definition.kind} of {definition.op} at {definition.origin.file}:{definition.origin.line} does not fit the op's "
        f"schema in torch {torch.__version__}, `{schema}`: {what}"
    )
