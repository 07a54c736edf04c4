"""Several processes that make one checkpoint (checkpoint.py): what the first tells the others, and where arrays lie.

Words and barriers go through jax's coordination service, not through the devices, which may be computing meanwhile.
Source: https://docs.jax.dev/en/latest/multi_process.html
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from torchax_core.errors import CheckpointError

__all__ = ["Meeting", "everywhere", "is_first", "locally", "several"]

_numbers = itertools.count()


def several() -> bool:
    """Whether jax runs in more than one process."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that makes folders and writes what there is one of."""
    return jax.process_index() == 0


class Meeting:
    """One save, of which every process makes a Meeting, in the same order. With one process it does nothing."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.told = 0

    def tell(self, word: str | None, error: BaseException | None = None) -> str:
        """What the first process says; the others give None, and are told.

        Raises CheckpointError in the others if the first has failed; `error`, in the first.
        """
        key = f"torchax/checkpoint/{self.number}/{self.told}"
        self.told += 1
        if is_first():
            if several():
                _client().key_value_set(key, f"!{error}" if error is not None else f"={word}")
            if error is not None:
                raise error
            return str(word)
        answer = _client().blocking_key_value_get(key, _timeout_ms())
        if answer[0] == "!":
            raise CheckpointError(f"save_checkpoint: the first process failed: {answer[1:]}")
        return str(answer[1:])

    def gather(self, what: str) -> None:
        """Wait until every process has come here."""
        if several():
            import orbax.checkpoint as ocp

            wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
            wait(key=f"torchax_checkpoint_{self.number}_{what}", timeout_ms=_timeout_ms())


def options(prefix: str) -> Any:
    """orbax's options for writing and reading together: barriers of the coordination service."""
    import orbax.checkpoint as ocp

    if not several():
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(jax.process_count())), barrier_sync_key_prefix=prefix
    )


def everywhere(array: Any) -> jax.Array:
    """An array that one process has for itself, as one that all have; the first's values are those that are saved."""
    if not several() or not array.is_fully_addressable:
        return array
    with jax.enable_x64(True):
        return jax.make_array_from_process_local_data(_on_all_devices(), np.asarray(array))


def locally(array: jax.Array, sharding: Any) -> jax.Array:
    """An array that all have, as one of this process's own, laid out by a sharding over its devices."""
    return jax.device_put(array.addressable_data(0), sharding)


def reading(sharding: Any) -> Any:
    """How an array that is to lie by `sharding` is read: itself, or by all if it is one process's own."""
    return _on_all_devices() if several() and sharding.is_fully_addressable else sharding


def _on_all_devices() -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    return jax.sharding.NamedSharding(mesh, jax.P())


def _client() -> Any:
    import orbax.checkpoint as ocp

    return ocp.multihost.get_jax_distributed_client()


def _timeout_ms() -> int:
    import orbax.checkpoint as ocp

    return int(ocp.multihost.coordination_timeout()) * 1000
