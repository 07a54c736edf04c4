"""Backwards of tensors on the device run in the thread that asks for them.

torch's engine has a thread for each device of an accelerator, so that kernels of several are started at once. Those of device
"jax" are Python calls that start work and return: a thread of their own only adds two hand-overs of Python's lock to a backward.
And the engine counts devices at its first backward, of CPU tensors too: one that ran before `import torchax_core` left none for
this one.
Source: https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torchax_core.tensor import Tensor

__all__ = ["run_backwards_here"]


def run_backwards_here() -> None:
    """Let `backward` and `grad` of tensors on the device keep to the thread they are called in. Once per process."""
    run: Any = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def run_backward(outputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(output, Tensor) for output in outputs):
            return run(outputs, *args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return run(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
