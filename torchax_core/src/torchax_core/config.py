"""Settings, one documented field each. `torchax_core.default_env().config`, or `Environment(config=Config(...))`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torchax_core.errors import ConfigError

__all__ = ["Config"]


@dataclasses.dataclass
class Config:
    """What a user may choose.

    packs:              names of the packs to use; None: all that are installed. `TORCHAX_PACKS` sets it ("aten,vision").
    blocked_packs:      names of packs to leave out. In `TORCHAX_PACKS`, a name with a minus ("-vision").
    pack_order:         names of packs, highest rank first; decides between packs that offer the same op.
    strict:             raise PackError for a pack that fails to load, instead of a warning. `TORCHAX_STRICT=1` sets it.
    cpu_fallback:       run ops that nobody defines on the CPU, with a warning once per op.
    compilation_cache:  folder of a persistent compilation cache: a new process then skips XLA for signatures seen before.
    random_impl:        the jax.random implementation of the environment's key: "threefry2x32", "rbg", "unsafe_rbg".
    donate:             let `torchax_core.jit` reuse the memory of state that it replaces.
    debug_accuracy:     compare every op with CPU torch: "raise" at the first difference (True means that too), or "warn"
                        of the first of each op. Jitted functions then run op by op. `TORCHAX_DEBUG=accuracy` sets it.
    debug_nans:         raise NonFiniteError at the op that makes NaN of inputs without. `TORCHAX_DEBUG=nans` sets it.
    debug_infs:         the same for infinities. `TORCHAX_DEBUG=infs` sets it.

    The debug fields are read when an Environment is made; `torchax_core.debug` switches them for a block.
    """

    packs: tuple[str, ...] | None = None
    blocked_packs: tuple[str, ...] = ()
    pack_order: tuple[str, ...] = ()
    strict: bool = False
    cpu_fallback: bool = False
    compilation_cache: str | None = None
    random_impl: str = "threefry2x32"
    donate: bool = True
    debug_accuracy: bool | str = False
    debug_nans: bool = False
    debug_infs: bool = False

    def __post_init__(self) -> None:
        if self.debug_accuracy is True:
            self.debug_accuracy = "raise"
        if self.debug_accuracy not in (False, "warn", "raise"):
            raise ConfigError(
                f'Config.debug_accuracy must be False, "warn" or "raise", but is {self.debug_accuracy!r}.'
            )
        impls = ("threefry2x32", "rbg", "unsafe_rbg")
        if self.random_impl not in impls:
            raise ConfigError(f"Config.random_impl must be one of {impls}, but is {self.random_impl!r}.")
        for field in ("packs", "blocked_packs", "pack_order"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ConfigError(
                    f"Config.{field} takes a tuple of names, but is the string {value!r}: write ({value!r},)."
                )
            if value is not None:
                setattr(self, field, tuple(value))

    def replace(self, **changes: Any) -> Config:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_environment(cls) -> Config:
        """The default settings, with what TORCHAX_PACKS, TORCHAX_STRICT, TORCHAX_CACHE and TORCHAX_DEBUG say."""
        names = [n.strip() for n in os.environ.get("TORCHAX_PACKS", "").split(",") if n.strip()]
        wanted = tuple(n for n in names if not n.startswith("-"))
        return cls(
            packs=wanted or None,
            blocked_packs=tuple(n[1:] for n in names if n.startswith("-")),
            strict=os.environ.get("TORCHAX_STRICT", "") not in ("", "0"),
            compilation_cache=os.environ.get("TORCHAX_CACHE") or None,
            **_debug_fields(os.environ.get("TORCHAX_DEBUG", "")),
        )


_DEBUG: dict[str, dict[str, Any]] = {
    "accuracy": {"debug_accuracy": "raise"},
    "accuracy:warn": {"debug_accuracy": "warn"},
    "nans": {"debug_nans": True},
    "infs": {"debug_infs": True},
}


def _debug_fields(text: str) -> dict[str, Any]:
    """The fields that TORCHAX_DEBUG sets. Raises ConfigError for a name it has not."""
    fields: dict[str, Any] = {}
    for name in filter(None, map(str.strip, text.split(","))):
        if name not in _DEBUG:
            raise ConfigError(f"TORCHAX_DEBUG: unknown check {name!r}; choose from {', '.join(_DEBUG)}.")
        fields |= _DEBUG[name]
    return fields
