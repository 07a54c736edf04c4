"""`torch.Generator(device="jax")`: a generator of the host's, from which draws on the device take their keys (random.py).

torch's own class asks C++ for a generator of the device, and there can be none. So `torch.Generator` makes one of ours for this
device; all others, and what `isinstance` says of them, stay as they are.
Source: https://docs.pytorch.org/docs/stable/generated/torch.Generator.html
"""

from __future__ import annotations

from typing import Any

import torch

from torchax_core.tensor import DEVICE, DEVICE_TYPE

__all__ = ["let_generators_be_made"]

_Generator: Any = torch._C.Generator


class DeviceGenerator(_Generator):  # type: ignore[misc]
    """What `torch.Generator(device="jax")` returns. Same seed, same numbers."""

    def __new__(cls, device: Any = DEVICE) -> DeviceGenerator:
        made: DeviceGenerator = _Generator.__new__(cls)
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        """The device, with its index if it was given one."""
        return self._device

    def clone_state(self) -> DeviceGenerator:
        """Another generator that will draw the same numbers."""
        return DeviceGenerator(self._device).set_state(self.get_state())  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _restored, (str(self._device), self.get_state())


def _restored(device: str, state: torch.Tensor) -> Any:
    return DeviceGenerator(device).set_state(state)


class _Making(type(_Generator)):  # type: ignore[misc]
    def __call__(cls, device: Any = "cpu") -> Any:
        ours = device is not None and torch.device(device).type == DEVICE_TYPE
        return DeviceGenerator(device) if ours else _Generator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


def let_generators_be_made() -> None:
    """Let `torch.Generator` make generators for the device. Once per process."""
    names = {"__doc__": _Generator.__doc__, "__module__": "torch"}
    torch.Generator = _Making("Generator", (_Generator,), names)  # type: ignore[misc,assignment]
