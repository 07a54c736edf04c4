"""`torchax.config`: google/torchax's Configuration, as a torchax_core.Config."""

from __future__ import annotations

import dataclasses
import warnings

from torchax_core.config import Config

__all__ = ["Configuration"]

_INSTEAD = {
    "debug_print_each_op": "set TORCHAX_LOG=ops",
    "debug_print_each_op_operands": "set TORCHAX_LOG=ops",
    "debug_mixed_tensor": "a mixed-device call raises an error that names the op and the argument",
    "use_int32_for_index": "indices have torch's dtype, int64",
    "use_tpu_flash_attention": "override aten::scaled_dot_product_attention with the kernel",
    "shmap_flash_attention": "override aten::scaled_dot_product_attention with the kernel",
    "use_torch_native_for_cpu_tensor": "CPU tensors are always torch's own",
    "allow_mixed_math_with_scalar_tensor": "0-d CPU tensors are always welcome, as on cuda",
    "force_materialize_views": "views alias, as in torch; take copies with .clone()",
    "use_dlpack_for_data_conversion": "conversions copy once, bit for bit",
    "internal_respect_torch_return_dtypes": "dtypes are always torch's",
    "treat_cuda_as_jax_device": "tensors go to device 'jax' by name",
}
"""The settings that have no effect here, and what there is instead."""


@dataclasses.dataclass
class Configuration(Config):
    """A torchax_core.Config that also takes google/torchax's settings, and warns of those that have no effect here."""

    debug_print_each_op: bool = False
    debug_print_each_op_operands: bool = False
    debug_accuracy_for_each_op: bool = False
    debug_mixed_tensor: bool = False
    use_int32_for_index: bool = False
    use_tpu_flash_attention: bool = False
    shmap_flash_attention: bool = False
    use_torch_native_for_cpu_tensor: bool = True
    allow_mixed_math_with_scalar_tensor: bool = True
    force_materialize_views: bool = False
    use_dlpack_for_data_conversion: bool = False
    internal_respect_torch_return_dtypes: bool = False
    treat_cuda_as_jax_device: bool = True

    def __post_init__(self) -> None:
        if self.debug_accuracy_for_each_op and not self.debug_accuracy:
            self.debug_accuracy = "warn"  # google/torchax prints what differs, and goes on
        super().__post_init__()
        for name, instead in _INSTEAD.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                warnings.warn(f"Configuration.{name} has no effect in torchax_core: {instead}.", stacklevel=3)
