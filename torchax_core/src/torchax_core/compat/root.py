"""What `torchax` itself has in google/torchax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import torchax_core
from torchax_core.checkpoint import load_checkpoint, save_checkpoint
from torchax_core.environment import default_env
from torchax_core.functional import jax_jit
from torchax_core.jittable import JittableModule, extract_jax
from torchax_core.modes import (
    disable_globally,
    disable_temporarily,
    enable_accuracy_mode,
    enable_globally,
    enable_performance_mode,
)

__all__ = [
    "CompileOptions",
    "VERSION",
    "compile",
    "default_env",
    "disable_globally",
    "disable_temporarily",
    "enable_accuracy_mode",
    "enable_globally",
    "enable_performance_mode",
    "extract_jax",
    "load_checkpoint",
    "save_checkpoint",
]

VERSION = torchax_core.__version__


@dataclasses.dataclass
class CompileOptions:
    """How `compile` compiles.

    methods_to_compile: of a module, by name.
    jax_jit_kwargs:     options of jax_jit.
    mode:               "jax"; for graphs of torch's own use torch.compile(backend="torchax").
    """

    methods_to_compile: list[str] = dataclasses.field(default_factory=lambda: ["forward"])
    jax_jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: str = "jax"


def compile(fn: torch.nn.Module | Callable[..., Any], options: CompileOptions | None = None) -> Any:
    """A JittableModule of a module, with the options' methods compiled; jax_jit of a function.

    Raises ValueError for a mode that is not "jax".
    """
    options = options or CompileOptions()
    if options.mode != "jax":
        raise ValueError(
            f"compile has mode 'jax' only, but got {options.mode!r}. For dynamo's graphs: torch.compile(fn, backend='torchax')."
        )
    if not isinstance(fn, torch.nn.Module):
        return jax_jit(fn, options.jax_jit_kwargs)
    module = JittableModule(fn, extra_jit_args=options.jax_jit_kwargs)
    for name in options.methods_to_compile:
        module.make_jitted(name)
    return module
