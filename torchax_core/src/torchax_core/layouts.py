"""Tensors that device "jax" has none of - sparse, quantized, nested in one strided buffer: refused, with the way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchax_core.errors import ConversionError

__all__ = ["refuse_layouts", "sparse_refused"]

_SPARSE = "sparse tensors", "make it dense first, with `.to_dense()`"
_REFUSED = {
    "SparsePrivateUse1": _SPARSE,
    "SparseCsrPrivateUse1": _SPARSE,
    "QuantizedPrivateUse1": ("quantized tensors", "make it one of floats first, with `.dequantize()`"),
    "NestedTensorPrivateUse1": (
        "nested tensors of layout torch.strided",
        "make it one of layout=torch.jagged, or pad it, with `.to_padded_tensor(0.0)`",
    ),
}
_libraries: list[Any] = []  # what they hold is gone with them


def refuse_layouts() -> None:
    """Give every op on such tensors a kernel that raises ConversionError. Once per process."""
    for key, (what, instead) in _REFUSED.items():
        library = torch.library.Library("_", "IMPL")  # noqa: TOR901 - kept
        library.fallback(_refusal(what, instead), key)
        _libraries.append(library)


def sparse_refused() -> ConversionError:
    """The error for making a sparse tensor of ours."""
    return _error("torch.sparse", *_SPARSE)


def _refusal(what: str, instead: str) -> Callable[..., Any]:
    def refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
        raise _error(f"{op.name()}", what, instead)

    return refuse


def _error(name: str, what: str, instead: str) -> ConversionError:
    return ConversionError(f"{name}: device 'jax' has no {what}; {instead}, and move it then.")
