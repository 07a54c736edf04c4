"""Which ops there are to check: torch's op database, or what a pack brings for its own."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchax_core.config import Config
from torchax_core.registry import OpTable

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = ["ATTRIBUTE", "op_db", "ops_of"]

ATTRIBUTE = "TORCHAX_OPINFO"
"""What a pack module may call its own list of OpInfos: "my_pack.testing:op_db", the list, or a function that gives it."""

# Names of torch's op database for what aten calls otherwise.
_PREFIXES = ("nn.functional.", "linalg.", "fft.", "special.")


@functools.cache
def op_db() -> dict[str, OpInfo]:
    """torch's op database by full name ("std.unbiased"). The first call imports it, which takes seconds.

    Raises ModuleNotFoundError if a module that the database imports is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
        try:
            from torch.testing._internal.common_methods_invocations import op_db as every
        except ModuleNotFoundError as error:
            error.add_note("torch's op database needs it: pip install 'torchax-core[testing]'")
            raise
    return {op.full_name: op for op in every}


@functools.cache
def ops_of(pack: str | None) -> dict[str, OpInfo]:
    """The ops of a pack by full name: its own list if its module names one in `TORCHAX_OPINFO`, else those of torch's
    op database that it defines. None: all of torch's. Raises ValueError for a pack that is not in use, or broken."""
    if pack is None:
        return op_db()
    table = OpTable(Config.from_environment())
    found = next((x for x in table.packs if x.name == pack), None)
    if found is None:
        raise ValueError(f"no pack {pack!r} is in use; there are {', '.join(x.name for x in table.packs) or 'none'}")
    definitions = table.host.definitions(found, table.config)
    if found.error is not None:
        raise ValueError(found.error)
    own = getattr(found.module, ATTRIBUTE, None)
    if own is not None:
        return {op.full_name: op for op in _listed(pack, own)}
    bases = {name.partition(".")[0] if "::" in name else name for name in definitions}
    return {name: op for name, op in op_db().items() if not bases.isdisjoint(_names(op))}


def _listed(pack: str, own: Any) -> Iterable[OpInfo]:
    if isinstance(own, str):
        module, _, name = own.partition(":")
        own = getattr(importlib.import_module(module), name or "op_db")
    return own() if callable(own) else own


def _names(op: OpInfo) -> set[str]:
    """What a pack may call the op: "aten::log_softmax", "torch.nn.functional.log_softmax"."""
    spoken = {op.name, *(alias.name for alias in op.aliases)}
    names = {f"torch.{name}" for name in spoken}
    for name in (*spoken, op.aten_name, op.decomp_aten_name, op.aten_backward_name):
        if name:
            names |= {f"aten::{name.replace('.', '_')}", *(f"aten::{name.removeprefix(x)}" for x in _PREFIXES)}
    return names
