"""`torchax.types`: names for annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import torch

__all__ = ["JaxCallable", "JaxValue", "TorchCallable", "TorchValue"]

TorchCallable: TypeAlias = Callable[..., Any]
TorchValue: TypeAlias = torch.Tensor | torch.dtype | TorchCallable | Any
JaxCallable: TypeAlias = Callable[..., Any]
JaxValue: TypeAlias = jax.Array | np.dtype | JaxCallable | Any
