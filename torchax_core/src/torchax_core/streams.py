"""Streams and events of the device, for code that asks `torch.jax` for them: JAX runs what is dispatched in order, so there
is one stream, and waiting in it is nothing to do.

torch.distributed.checkpoint copies tensors to the CPU on one; fully_shard sends weights on several.
Source: https://docs.pytorch.org/docs/stable/generated/torch.Stream.html
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torchax_core.tensor import DEVICE, DEVICE_TYPE

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream"]


class Stream:
    """The order in which JAX runs what is dispatched. All are one and the same."""

    device_type = DEVICE_TYPE
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = DEVICE

    def synchronize(self) -> None:
        """Wait until everything dispatched so far has run."""
        torch.get_device_module(DEVICE_TYPE).synchronize()

    def query(self) -> bool:
        """False: JAX does not tell whether something is still running."""
        return False

    def wait_stream(self, stream: Any) -> None:
        """Nothing to do: what comes later runs later."""

    def wait_event(self, event: Any) -> None:
        """Nothing to do: what comes later runs later."""

    def record_event(self, event: Any = None) -> Event:
        """An event after everything dispatched so far."""
        event = Event() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(DEVICE_TYPE)


class Event(torch.Event):
    """A point in the one stream. C++, which torch.accelerator's streams are, takes an event for torch's own without a look.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.Event.html
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return super().__new__(cls, DEVICE_TYPE)

    def record(self, stream: Any = None) -> None:
        """Nothing to do: JAX does not tell when something has run, so the point is not looked at."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to do: what comes later runs later."""

    def query(self) -> bool:
        """False: JAX does not tell whether something is still running."""
        return False

    def synchronize(self) -> None:
        """Wait until everything dispatched so far has run, which is what the event stands after, and more."""
        torch.get_device_module(DEVICE_TYPE).synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        """Raises RuntimeError: JAX does not tell when something has run."""
        raise RuntimeError(
            "torch.jax.Event.elapsed_time: JAX does not tell when something has run. Call torch.jax.synchronize(), and read "
            "time.perf_counter()."
        )


def current_stream(device: Any = None) -> Stream:
    """The one stream."""
    return Stream()


default_stream = current_stream


def stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """A block on a stream, which makes no difference."""
    return contextlib.nullcontext()
