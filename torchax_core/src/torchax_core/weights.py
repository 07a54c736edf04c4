"""Weights in safetensors files, to and from device "jax": every dtype as it is, bit for bit, shard by shard.

Needs `pip install torchax-core[checkpoints]`.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from torchax_core.checkpoint import put_into
from torchax_core.convert import array_from_torch
from torchax_core.dtypes import BIT_CAST, jax_dtype
from torchax_core.errors import CheckpointError
from torchax_core.placement import automatic
from torchax_core.tensor import Tensor, wrap_array

__all__ = ["load_safetensors", "save_safetensors"]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors is not installed: `pip install torchax-core[checkpoints]`.") from error
    return safetensors


def save_safetensors(
    tensors: Mapping[str, torch.Tensor] | torch.nn.Module,
    path: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors on any device, or a module's state_dict, to one file, which replaces `path` when complete.

    metadata: strings to put in the file's header.
    """
    library = _safetensors()
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    target = pathlib.Path(path)
    unfinished = target.with_name(f".{target.name}.saving")
    library.torch.save_file(plain, unfinished, metadata)
    os.replace(unfinished, target)


def load_safetensors(
    path: str | os.PathLike[str],
    *,
    into: torch.nn.Module | None = None,
    shardings: Callable[[str, tuple[int, ...]], Any] | None = None,
) -> Any:
    """The tensors of a file, on device "jax", by name; or with `into`, that module with them as its weights.

    into:      keeps how its parameters are laid out over devices. All of it is taken up, or nothing.
    shardings: (name, shape) -> the jax sharding to lay a tensor out by, or None; only what a device holds is then read for it.
    Raises CheckpointError for a file that is damaged, no safetensors file, or does not fit `into`.
    """
    library = _safetensors()
    if into is not None and shardings is None:
        own = into.state_dict()
        shardings = lambda name, shape: _sharding_of(own.get(name))
    found: dict[str, torch.Tensor] = {}
    try:
        with library.safe_open(os.fspath(path), framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                sharding = shardings(name, tuple(part.get_shape())) if shardings else None
                found[name] = _read(file, name, part, sharding)
    except (OSError, library.SafetensorError) as error:
        raise CheckpointError(
            f"load_safetensors: {os.fspath(path)} cannot be read: {error}. It is damaged, or no safetensors file."
        ) from error
    return found if into is None else put_into(into, found, None)


def _sharding_of(tensor: Any) -> Any:
    return tensor.detach().jax().sharding if isinstance(tensor, Tensor) else None


def _read(file: Any, name: str, part: Any, sharding: Any) -> torch.Tensor:
    if sharding is None or not part.get_shape():
        return wrap_array(array_from_torch(file.get_tensor(name)))

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        piece = part[index].contiguous()
        cast = BIT_CAST.get(piece.dtype)
        return piece.numpy() if cast is None else piece.view(cast[0]).numpy().view(jax_dtype(piece.dtype))

    with jax.enable_x64(True):
        return wrap_array(jax.make_array_from_callback(tuple(part.get_shape()), automatic(sharding), shard))
