"""Questions that value checks ask of a call's arrays (`OpSet.value_check`)."""

from __future__ import annotations

import numpy as np

__all__ = ["outside"]


def outside(index: np.ndarray, size: int, lowest: int = 0) -> bool:
    """Whether some position in `index`, of any shape, is below `lowest` or not below `size`."""
    return bool(index.size) and (int(index.min()) < lowest or int(index.max()) >= size)
