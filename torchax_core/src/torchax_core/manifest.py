"""What a pack says it serves, read from the source of its pack module: neither the module nor its package is imported.

The constants TORCHAX_* (see hookspecs.py) are plain literals at the module's top level, so parsing them says what
running the module would. Where they are not, or there is no source (a compiled module), there is no manifest, and the
module has to be imported to know.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.machinery
import importlib.util
import re
from typing import Any

from torchax_core.errors import PackError

__all__ = ["CONSTANTS", "Manifest", "read_manifest"]

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_TUPLES = ("TORCHAX_NAMESPACES", "TORCHAX_OPS", "TORCHAX_FUNCTIONS", "TORCHAX_BEFORE")
CONSTANTS = ("TORCHAX_PACK_API", *_TUPLES)
"""What a pack module may state."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The constants of a pack module.

    api:        TORCHAX_PACK_API, None if not stated.
    namespaces: torch op namespaces served;  ops: single ops;  functions: torch functions, by dotted name.
    before:     names of the packs whose definitions give way to this pack's.
    """

    api: Any
    namespaces: tuple[str, ...]
    ops: frozenset[str]
    functions: frozenset[str]
    before: frozenset[str]

    @classmethod
    def of(cls, constants: dict[str, Any]) -> Manifest:
        """The manifest that these constants make. Raises PackError for one that is no tuple of strings."""
        namespaces, ops, functions, before = (_names(constants, name) for name in _TUPLES)
        api = constants.get("TORCHAX_PACK_API")
        return cls(api, namespaces, frozenset(ops), frozenset(functions), frozenset(before))


def read_manifest(target: str) -> Manifest | None:
    """The manifest of a pack module ("my_pack.pack") from its source; None if only importing the module can tell.

    Works for packages in folders, namespace packages, zip files and editable installs.
    """
    source = _source(target)
    constants = _constants(source) if source is not None else None
    return Manifest.of(constants) if constants and "TORCHAX_PACK_API" in constants else None


def _names(constants: dict[str, Any], name: str) -> tuple[str, ...]:
    value = constants.get(name, ())
    if isinstance(value, str) or not all(isinstance(v, str) for v in value):
        raise PackError(f"its {name} must be a tuple of strings, but is {value!r}.")
    return tuple(value)


def _source(target: str) -> str | None:
    if not _MODULE.fullmatch(target):
        return None
    top, *rest = target.split(".")
    try:
        spec = importlib.util.find_spec(top)  # of a top-level name, this imports nothing
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            places = list(spec.submodule_search_locations)
            spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", places)
        get_source = getattr(spec.loader, "get_source", None) if spec is not None else None
        return get_source(target) if get_source is not None else None
    except (ImportError, ValueError, OSError):  # a broken finder or file: importing it will say more
        return None


def _constants(source: str) -> dict[str, Any] | None:
    """The TORCHAX_* literals of a module; None if something else than a literal at top level decides them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.startswith("TORCHAX_"):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name.startswith("TORCHAX_"):
                pass
            case _:
                continue
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            return None
    return found if _mentions(tree) == len(found) else None


def _mentions(tree: ast.Module) -> int:
    """In how many places a TORCHAX_* name is, or may be, given a value."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            count += not isinstance(node.ctx, ast.Load) and node.id.startswith("TORCHAX_")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name for alias in node.names]
            count += sum(name == "*" or name.startswith("TORCHAX_") for name in names)
    return count
