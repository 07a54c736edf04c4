"""`torchax.ops.ops_registry`, `.jtorch` and `.jaten`: definitions of ops, put in force as overrides in every environment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torchax_core.environment import Override, current_env, override_op_definition, resolve_op

__all__ = [
    "Operator",
    "all_aten_ops",
    "all_torch_functions",
    "op",
    "register_function",
    "register_torch_dispatch_op",
    "register_torch_function_op",
]


@dataclasses.dataclass
class Operator:
    """A definition that was registered. `override.undo()` takes it back."""

    torch_op: Any
    func: Callable[..., Any]
    is_jax_function: bool
    is_user_defined: bool
    needs_env: bool
    is_view_op: bool
    override: Override


all_aten_ops: dict[Any, Operator] = {}
all_torch_functions: dict[Any, Operator] = {}
# What was registered through here; who defines any other op is told by `default_env().explain(op)`.


def register_torch_dispatch_op(
    aten_op: Any,
    impl_callable: Callable[..., Any],
    is_jax_function: bool = True,
    is_user_defined: bool = False,
    needs_env: bool = False,
    is_view_op: bool = False,
) -> Callable[..., Any]:
    """Let `impl_callable` run an aten op, in every environment; returns it. A later registration goes before.

    needs_env: give it the active environment as `env`.
    """
    return _register(all_aten_ops, aten_op, impl_callable, is_jax_function, is_user_defined, needs_env, is_view_op)


def register_torch_function_op(
    torch_func: Any,
    impl_callable: Callable[..., Any],
    is_jax_function: bool = True,
    is_user_defined: bool = False,
    needs_env: bool = False,
    is_view_op: bool = False,
) -> Callable[..., Any]:
    """As register_torch_dispatch_op, for a function of torch's."""
    return _register(
        all_torch_functions, torch_func, impl_callable, is_jax_function, is_user_defined, needs_env, is_view_op
    )


def register_function(torch_func: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: register_torch_function_op of what it decorates."""
    return functools.partial(register_torch_function_op, torch_func, **kwargs)


def op(*aten: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: register_torch_dispatch_op of what it decorates, for each of the ops."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in aten:
            register_torch_dispatch_op(one, function, **kwargs)
        return function

    return register


def _register(
    table: dict[Any, Operator], torch_op: Any, impl: Callable[..., Any], is_jax: bool, user: bool, env: bool, view: bool
) -> Callable[..., Any]:
    body = impl
    if env:

        @functools.wraps(impl)
        def body(*args: Any, **kwargs: Any) -> Any:
            return impl(*args, **kwargs, env=current_env())

    found = resolve_op(torch_op)
    if is_jax and not view and found is not None:
        body = _by_position(body, found)
    override = override_op_definition(torch_op, body, is_jax_function=is_jax, is_view_op=view)
    table[torch_op] = Operator(torch_op, impl, is_jax, user, env, view, override)
    return impl


def _by_position(impl: Callable[..., Any], func: Any) -> Callable[..., Any]:
    """A jax function whose parameters have names of its own, called with the op's arguments in the order of the schema."""
    overloads = [getattr(func, name) for name in func.overloads()] if hasattr(func, "overloads") else [func]
    schemas = [overload._schema.arguments for overload in overloads]
    accepted = inspect.signature(impl).parameters.values()
    any_name = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}

    @functools.wraps(impl)
    def body(**given: Any) -> Any:
        arguments = next(s for s in schemas if set(given) <= {a.name for a in s})
        positional = [a for a in arguments if not a.kwarg_only]
        while positional and positional[-1].name not in given:
            positional.pop()
        values = [given.get(a.name, a.default_value) for a in positional]
        named = {a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given}
        return impl(*values, **{n: v for n, v in named.items() if any_name or n in names})

    body.__signature__ = inspect.Signature([inspect.Parameter("given", inspect.Parameter.VAR_KEYWORD)])  # type: ignore[attr-defined]
    return body
