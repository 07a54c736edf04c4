"""The files of a new op pack, written from the templates in pack_template/. `torchax new-pack` is its command.

A template is the file itself, with `<<module>>` and its kin where a name of the new pack belongs (`Names`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from torchax_core.errors import PackNameError
from torchax_core.packs import GROUP

__all__ = ["Names", "new_pack"]

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PLACE = re.compile(r"<<(\w+)>>")


@dataclasses.dataclass(frozen=True)
class Names:
    """What a new pack is called where.

    distribution: for pip ("my-pack").    module: for import, as torch namespace, and as the pack's name ("my_pack").
    core:         the version of torchax-core that it is written for.
    """

    distribution: str
    module: str
    core: str

    @classmethod
    def of(cls, name: str) -> Names:
        """The names that follow from one. Raises PackNameError if no module can be called so, or another one is."""
        module = re.sub(r"[._-]+", "_", name).lower()
        if not _NAME.fullmatch(name) or keyword.iskeyword(module):
            raise PackNameError(
                f"a pack cannot be called {name!r}: a name has letters, digits, '-', '_' and '.', begins with a letter, and "
                "is no keyword of Python. For example: my-pack."
            )
        ours = {point.module for point in importlib.metadata.entry_points(group=GROUP)}
        if module in sys.stdlib_module_names or (
            f"{module}.pack" not in ours and importlib.util.find_spec(module) is not None
        ):
            raise PackNameError(
                f"a module called {module!r} is there already, which the pack's own would hide. Choose another name than "
                f"{name!r}."
            )
        return cls(module.replace("_", "-"), module, importlib.metadata.version("torchax-core"))


def new_pack(name: str, parent: Path) -> list[Path]:
    """Write a complete pack to the folder `parent / name`: the paths of its files.

    Raises PackNameError if the name will not do, or the folder is there already; then nothing is written.
    """
    names = Names.of(name)
    folder = parent / name
    if folder.exists():
        raise PackNameError(f"{folder} is there already. Remove it, or choose another name or another folder (--into).")
    written = []
    for parts, template in _templates(files("torchax_core") / "pack_template"):
        path = folder.joinpath(*(_part(part, names) for part in parts))
        text = _PLACE.sub(lambda place: getattr(names, place[1]), template.read_text("utf-8"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def _part(part: str, names: Names) -> str:
    """A part of a template's path as it is in the pack: wheels lose files whose names begin with a dot."""
    return part.removesuffix(".tmpl").replace("dot_", ".", 1).replace("__module__", names.module)


def _templates(folder: Traversable, *above: str) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    """The templates below a folder, each with the parts of its path there."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(entry, *above, entry.name)
        else:
            yield (*above, entry.name), entry
