"""Code written for google/torchax, run on torchax_core: `install()` makes `import torchax` find what is here.

    import torchax_core.compat
    torchax_core.compat.install()
    import torchax, torchax.interop        # ours, by those names

docs/migration.md lists every name, and what there is instead of those that are not here.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

__all__ = ["install", "uninstall"]

MODULES = {
    "torchax": "torchax_core.compat.root",
    "torchax.amp": "torchax_core.compat.amp",
    "torchax.checkpoint": "torchax_core.checkpoint",
    "torchax.config": "torchax_core.compat.config",
    "torchax.device_module": "torchax_core.compat.device_module",
    "torchax.export": "torchax_core.compat.export",
    "torchax.flax": "torchax_core.flax",
    "torchax.interop": "torchax_core.interop",
    "torchax.mesh_util": "torchax_core.mesh_util",
    "torchax.ops": "torchax_core.compat.ops",
    "torchax.ops.jaten": "torchax_core.compat.ops",
    "torchax.ops.jtorch": "torchax_core.compat.ops",
    "torchax.ops.mappings": "torchax_core.compat.mappings",
    "torchax.ops.ops_registry": "torchax_core.compat.ops",
    "torchax.tensor": "torchax_core.compat.tensor",
    "torchax.train": "torchax_core.train",
    "torchax.types": "torchax_core.compat.types",
    "torchax.util": "torchax_core.compat.util",
    "torchax.view": "torchax_core.view",
}
"""The module behind each of google/torchax's names."""


class _Alias(types.ModuleType):
    """A module by another name; the one behind it is imported when first asked for something."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"{target}, by the name it has in google/torchax.")
        package = any(other.startswith(name + ".") for other in MODULES)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=target, is_package=package)
        self.__package__ = name if package else name.rpartition(".")[0]
        if package:
            self.__path__: list[str] = []
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" or not name.startswith("__"):
            module = importlib.import_module(self._target)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(
            f"module {self.__name__!r} has no {name!r} here: it is {self._target}, installed by torchax_core.compat. "
            "docs/migration.md says what there is instead."
        )

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._target))


def install(*, force: bool = False) -> None:
    """Let `import torchax` and its submodules find torchax_core's, in this process. Twice is no fault.

    force: also if google/torchax is installed, or imported; what has been imported from it already stays its own.
    Raises ImportError in that case without it.
    """
    present = sys.modules.get("torchax")
    if isinstance(present, _Alias):
        return
    if present is not None and not force:
        raise ImportError(
            f"torchax is imported already, from {getattr(present, '__file__', None)}; code that has it would run on two at once. "
            "Call torchax_core.compat.install() before the first `import torchax`, or with force=True."
        )
    found = None if present is not None else importlib.util.find_spec("torchax")
    if found is not None and found.origin is not None and not force:
        raise ImportError(
            f"google/torchax is installed, at {found.origin}, and would be hidden. `pip uninstall torchax`, or use it; "
            "torchax_core.compat.install(force=True) hides it in this process."
        )
    for name in [name for name in sys.modules if name == "torchax" or name.startswith("torchax.")]:
        del sys.modules[name]
    for name, target in MODULES.items():
        alias = sys.modules[name] = _Alias(name, target)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, alias)


def uninstall() -> None:
    """Take the names back: `import torchax` finds what it found before."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Alias)]:
        del sys.modules[name]
