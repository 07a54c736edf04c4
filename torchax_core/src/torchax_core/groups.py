"""The backend "jax" of torch.distributed, of which the core knows no more than that a pack brings it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch.distributed as dist

from torchax_core.tensor import DEVICE_TYPE

__all__ = ["announce_backend"]

_GROUP = "torch.distributed.backends"


def announce_backend() -> None:
    """Let `init_process_group("jax")` find the backend by its entry point, as torch itself does from 2.14 on: it is imported
    when the first group of it is made. What torch does without a backend's name stays as it was."""
    if not dist.is_available() or hasattr(dist.Backend, "_ensure_backend_registered"):
        return
    if DEVICE_TYPE.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(DEVICE_TYPE, _create, extended_api=True, devices=[DEVICE_TYPE])
        del dist.Backend.default_device_backend_map[DEVICE_TYPE]


def _create(*arguments: Any) -> Any:
    for point in importlib.metadata.entry_points(group=_GROUP, name=DEVICE_TYPE):
        point.load()()
        return dist.Backend._plugins[DEVICE_TYPE.upper()].creator_fn(*arguments)
    raise ImportError(f"no installed pack has the backend {DEVICE_TYPE!r}: `pip install torchax-ops-c10d`.")
