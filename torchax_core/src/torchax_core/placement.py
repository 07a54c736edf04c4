"""Where arrays lie. A tensor laid out over several devices stays laid out so, whatever is written to it.

With one device nothing here has anything to do, and says so at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.shard_alike import shard_alike

from torchax_core.convert import is_traced

__all__ = [
    "Placed",
    "alike",
    "automatic",
    "automatic_mesh",
    "constrain",
    "laid_out_like",
    "several_devices",
    "sharding_of",
    "spread",
]


@functools.cache
def several_devices() -> bool:
    """Whether there is any choice of where an array lies."""
    return jax.device_count() > 1


def sharding_of(array: Any) -> Any:
    """The sharding of an array that lies on several devices; None for any other, and for traced ones."""
    if is_traced(array) or not several_devices():
        return None
    sharding = array.sharding
    return sharding if len(sharding.device_set) > 1 else None


def laid_out_like(new: Any, old: Any) -> Any:
    """The array `new` laid out as `old` is, if that lies on several devices and they have one shape. Not for traced arrays."""
    sharding = None if is_traced(new) else sharding_of(old)
    if sharding is None or new.shape != old.shape:
        return new
    found = new.sharding
    if found is sharding or found.is_equivalent_to(sharding, new.ndim):
        return new
    return _put(new, sharding)


def _put(array: Any, sharding: Any) -> Any:
    """jax.device_put. With 64-bit types off, jax moves 64-bit arrays between devices as 32-bit ones, and XLA crashes."""
    with jax.enable_x64(True):
        return jax.device_put(array, sharding)


def alike(new: Any, old: Any) -> Any:
    """`new`, with word to XLA that it is to lie as `old` does, where a program is compiled for several devices.

    For results that do not depend on the values of `old`: XLA would make them whole, on every device.
    Source: https://docs.jax.dev/en/latest/jax.experimental.shard_alike.html
    """
    if not several_devices() or new.shape != old.shape or not is_traced(old):
        return new
    return shard_alike(old, new)[1]


class Placed:
    """A function of arrays to a list of them under jax.jit, compiled once for each way that its results are to lie.

    anywhere: where XLA likes; all there is to choose from with one device.
    """

    def __init__(self, fn: Callable[..., Any], donate: tuple[int, ...]) -> None:
        self.fn = fn
        self.donate = donate
        self.anywhere = jax.jit(fn, donate_argnums=donate)
        self._made: dict[Any, Any] = {}

    def laid_out(self, shardings: tuple[Any, ...]) -> Callable[..., Any]:
        """The function whose results lie by these shardings, where XLA likes those for which it is None."""
        if not any(shardings):
            return self.anywhere
        made = self._made.get(shardings)
        if made is None:
            made = self._made[shardings] = jax.jit(self.fn, donate_argnums=self.donate, out_shardings=[*shardings])
        return made


def spread(stores: list[Any], others: list[Any]) -> None:
    """If any of the arrays lies on several devices, let all of `stores` whose arrays may lie anywhere lie on all of them.

    jax would copy such an array to every device in each call, and XLA's results would lie there from then on.
    """
    found = (sharding_of(array) for array in [*(store.array for store in stores), *others])
    sharding = next((s for s in found if isinstance(s, jax.sharding.NamedSharding)), None)
    if sharding is None:
        return
    everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.P())
    moved: dict[int, tuple[Any, Any]] = {}  # an array that several storages hold stays one
    for store in stores:
        array = store.array
        if not array.committed:
            if id(array) not in moved:
                moved[id(array)] = (array, _put(array, everywhere))
            store.array = moved[id(array)][1]


def automatic_mesh(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh with its explicit axes (jax.make_mesh's default) as automatic ones: how ops run on shards is XLA's affair."""
    axis = jax.sharding.AxisType
    if axis.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(axis.Auto if t is axis.Explicit else t for t in mesh.axis_types)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def automatic(sharding: Any) -> Any:
    """The sharding over its mesh with automatic axes, said as XLA's results say it: P("x"), not P("x", None), for which jax
    would compile anew."""
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    mesh, spec = automatic_mesh(sharding.mesh), sharding.spec
    if len(spec) and spec[-1] is None and not getattr(spec, "unreduced", None):
        last = max((i for i, entry in enumerate(spec) if entry is not None), default=-1)
        spec = jax.P(*spec[: last + 1])
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def constrain(array: Any, sharding: Any) -> Any:
    """The array laid out by a sharding; in a program, as a constraint on it."""
    if is_traced(array):
        return jax.lax.with_sharding_constraint(array, automatic(sharding))
    return _put(array, automatic(sharding))
