"""Whether a definition's parameters fit its op's schema: asked when a pack is loaded, and for overrides at the first call."""

from __future__ import annotations

from typing import Any

from torchax_core.errors import SignatureError
from torchax_core.opset import Definition
from torchax_core.variants import find_op

__all__ = ["LEFT_OUT", "check_parameters", "check_signature"]

LEFT_OUT = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking", "generator"})
"""Schema arguments that a lowering need not take: they say where and how, not what."""


def check_signature(definition: Definition) -> None:
    """Raise SignatureError if a pack's lowering does not fit; an op that the installed torch lacks is passed over."""
    if definition.kind != "lowering" or definition.positional:
        return
    func = find_op(definition.op)
    if func is not None:
        check_parameters(definition, func._schema)


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
        raise SignatureError(
            f"the {definition.kind} of {definition.op} at {definition.origin.file}:{definition.origin.line} does not fit the "
            f"op's schema `{schema}`: {'; '.join(said)}. Name the parameters as the schema does."
        )
