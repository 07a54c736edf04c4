"""Shardings given for arguments and results, in a pytree that is a prefix of theirs: one for each tensor.

Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from torchax_core.arguments import Call, flatten
from torchax_core.errors import ShapeError
from torchax_core.placement import automatic_mesh

__all__ = ["argument_shardings", "automatic_axes", "resolve", "spread_prefix"]


def argument_shardings(prefix: Any, call: Call, static: Any, what: str) -> list[Any]:
    """The sharding of each leaf of a call; static arguments have none.

    Raises ShapeError where the prefix does not fit, TypeError for keyword arguments, which have no place in it.
    """
    args, kwargs = call.tree
    prefix = resolve(prefix, what)
    if kwargs and isinstance(prefix, (tuple, list)) and any(static is None or n not in static.names for n in kwargs):
        raise TypeError(
            f"{what} is for positional arguments, but the call has {', '.join(kwargs)} by keyword. Give them by position."
        )
    chosen = [i for i in range(len(args)) if static is None or i not in static.places]
    if isinstance(prefix, (tuple, list)):
        if len(prefix) != len(chosen):
            raise ShapeError(
                f"{what} has {len(prefix)} entries, one for each positional argument that is not static, but the call has "
                f"{len(chosen)} of them."
            )
        given = dict(zip(chosen, prefix, strict=True))
    else:
        given = dict.fromkeys(chosen, prefix)
    found: list[Any] = []
    for i, value in enumerate(args):
        found += spread_prefix(given.get(i), value, f"{what}[{i}]")
    for value in kwargs.values():
        found += spread_prefix(None, value, what)
    return found


def spread_prefix(prefix: Any, tree: Any, what: str) -> list[Any]:
    """The sharding of each leaf of `tree`, None where it stays as it is.

    prefix: from `resolve`. Raises ShapeError if it is no prefix of `tree`.
    """
    if prefix is None or isinstance(prefix, jax.sharding.Sharding):
        leaves: list[Any] = []
        flatten(tree, leaves)
        return [prefix] * len(leaves)
    fields = _fields(prefix)
    parts = _fields(tree)
    if fields is None or parts is None or set(fields) != set(parts):
        raise ShapeError(
            f"{what}: {_short(prefix)} is no prefix of {_short(tree)}. Give one sharding for all of it, or one for each part."
        )
    return [s for key, part in parts.items() for s in spread_prefix(fields[key], part, f"{what}[{key!r}]")]


def automatic_axes() -> Any:
    """A context in which the axes of the mesh that is set are automatic ones, as torch code needs them (placement.py)."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a jax transformation
        return contextlib.nullcontext()
    automatic = automatic_mesh(mesh)
    return contextlib.nullcontext() if automatic is mesh else jax.set_mesh(automatic)


def _fields(tree: Any) -> dict[Any, Any] | None:
    """The parts of a container by their names, in the order of its leaves; None for what is none."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def resolve(prefix: Any, what: str) -> Any:
    """`prefix` with its PartitionSpecs as shardings over the mesh that `jax.set_mesh` has set.

    Raises ShapeError if there is none.
    """
    if isinstance(prefix, jax.P):
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # inside a jax transformation
            mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ShapeError(
                f"{what}: {prefix} names axes of a mesh, but none is set. Give `jax.sharding.NamedSharding(mesh, {prefix})`, or "
                "call the function under `with jax.set_mesh(mesh):`."
            )
        return jax.sharding.NamedSharding(mesh, prefix)
    if isinstance(prefix, dict):
        return {key: resolve(part, what) for key, part in prefix.items()}
    if isinstance(prefix, (list, tuple)):
        return [resolve(part, what) for part in prefix]
    if dataclasses.is_dataclass(prefix) and not isinstance(prefix, (type, jax.sharding.Sharding)):
        return {field.name: resolve(getattr(prefix, field.name), what) for field in dataclasses.fields(prefix)}
    return prefix


def _short(tree: Any) -> str:
    fields = _fields(tree)
    if fields is None:
        return type(tree).__name__
    return f"{type(tree).__name__} of {', '.join(map(repr, fields)) if isinstance(tree, dict) else len(fields)}"
