"""`torchax.device_module`: torch.jax's functions, by google/torchax's names."""

from __future__ import annotations

import torch

__all__ = [
    "current_device",
    "device_count",
    "get_amp_supported_dtype",
    "get_rng_state",
    "is_available",
    "manual_seed_all",
    "set_rng_state",
]

current_device = torch.jax.current_device  # type: ignore[attr-defined]
device_count = torch.jax.device_count  # type: ignore[attr-defined]
get_amp_supported_dtype = torch.jax.get_amp_supported_dtype  # type: ignore[attr-defined]
get_rng_state = torch.jax.get_rng_state  # type: ignore[attr-defined]
is_available = torch.jax.is_available  # type: ignore[attr-defined]
manual_seed_all = torch.jax.manual_seed_all  # type: ignore[attr-defined]
set_rng_state = torch.jax.set_rng_state  # type: ignore[attr-defined]
