"""google/torchax's switches, for code that has them in it. The device "jax" needs none: it is there from the import on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torchax_core.environment import Environment, default_env

__all__ = [
    "disable_globally",
    "disable_temporarily",
    "enable_accuracy_mode",
    "enable_globally",
    "enable_performance_mode",
]


def enable_globally() -> Environment:
    """The default environment. Ops on tensors of device "jax" need no mode to be switched on."""
    return default_env()


def disable_globally() -> None:
    """Nothing: tensors on other devices are never touched, and those on "jax" can have no other meaning."""


@contextlib.contextmanager
def disable_temporarily() -> Iterator[None]:
    """A block in which factory functions without `device=` make CPU tensors, whatever the default device is."""
    with torch.device("cpu") if torch.get_default_device().type == "jax" else contextlib.nullcontext():
        yield


def enable_accuracy_mode() -> None:
    """float32 products in full precision: torch.set_float32_matmul_precision("highest"), torch's default.

    dtypes are torch's in any mode, 64-bit ones too; jax's own settings are not changed.
    """
    torch.set_float32_matmul_precision("highest")


def enable_performance_mode() -> None:
    """float32 products as fast as the chip does them, with bfloat16's precision on a TPU: "medium" of
    torch.set_float32_matmul_precision."""
    torch.set_float32_matmul_precision("medium")
