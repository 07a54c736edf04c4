"""Where torch's own results differ between the versions this pack runs with: one function for each difference."""

from __future__ import annotations

import torch

__all__ = ["int64_arange_truncates_first"]


def int64_arange_truncates_first() -> bool:
    """Before 2.14, `arange` of dtype int64 cast start, end and step to int64 before it counted its elements."""
    return torch.__version__ < (2, 14)
