"""`torchax.amp`: autocast, which is torch's own here."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["autocast"]


def autocast(device: Any, dtype: torch.dtype = torch.bfloat16, env: Any = None) -> Any:
    """torch.autocast("jax", dtype), whatever the device is called; the op packs say how each op is cast."""
    return torch.autocast("jax", dtype=dtype)
