"""torchax: PyTorch programs on JAX/XLA. Importing this makes "jax" a torch device; how ops run comes from packs.

import torch, torchax_core
x = torch.randn(3, 4, device="jax")
"""

from torchax_core.startup import without_collections

with without_collections():
    from torchax_core import debug, errors
    from torchax_core.caches import clear_caches
    from torchax_core.checkpoint import load_checkpoint, save_checkpoint
    from torchax_core.config import Config
    from torchax_core.control_flow import register as _register_control_flow
    from torchax_core.device import register as _register
    from torchax_core.environment import Environment, Override, current_env, default_env, override_op_definition
    from torchax_core.hookspecs import hookimpl
    from torchax_core.interop import JittableModule, extract_jax, tensor
    from torchax_core.jit import compile, jit
    from torchax_core.modes import (
        disable_globally,
        disable_temporarily,
        enable_accuracy_mode,
        enable_globally,
        enable_performance_mode,
    )
    from torchax_core.opset import OpSet
    from torchax_core.promotion import (
        ALWAYS_BOOL,
        AS_GIVEN,
        BOOL_TO_LONG,
        COMPLEX_TO_FLOAT,
        INT_TO_FLOAT,
        KEEP,
        SAME,
        Promotion,
        opmath,
    )
    from torchax_core.reporting import report
    from torchax_core.tensor import Tensor
    from torchax_core.view import View

__version__ = "0.1.0"

__all__ = [
    "ALWAYS_BOOL",
    "AS_GIVEN",
    "BOOL_TO_LONG",
    "clear_caches",
    "compile",
    "COMPLEX_TO_FLOAT",
    "Config",
    "current_env",
    "debug",
    "default_env",
    "disable_globally",
    "disable_temporarily",
    "enable_accuracy_mode",
    "enable_globally",
    "enable_performance_mode",
    "Environment",
    "errors",
    "extract_jax",
    "hookimpl",
    "INT_TO_FLOAT",
    "jit",
    "JittableModule",
    "KEEP",
    "load_checkpoint",
    "opmath",
    "OpSet",
    "Override",
    "override_op_definition",
    "Promotion",
    "report",
    "SAME",
    "save_checkpoint",
    "tensor",
    "Tensor",
    "View",
]

_register()
_register_control_flow()
