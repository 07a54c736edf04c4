"""Makes PrivateUse1 the device "jax": its name, the `torch.jax` module, and the kernels torch calls without a tensor of ours.

Importing torchax_core runs :func:`register`, once; nothing else of torch or jax changes.
Source: https://docs.pytorch.org/docs/stable/notes/custom_backends.html
"""

from __future__ import annotations

import contextlib
import itertools
import types
from typing import Any

import jax
import torch
import torch.fx.experimental.proxy_tensor as proxies
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torchax_core.addresses import let_tensors_have_addresses
from torchax_core.backward import run_backwards_here
from torchax_core.entrances import entrance
from torchax_core.forking import in_bad_fork
from torchax_core.freeing import let_storages_be_freed
from torchax_core.generators import let_generators_be_made
from torchax_core.groups import announce_backend
from torchax_core.layouts import refuse_layouts
from torchax_core.lazy import make_lazy_here
from torchax_core.moving import keep_parameters
from torchax_core.storages import let_bytes_be_copied, refuse_storages
from torchax_core.streams import Event, Stream, current_stream, default_stream, stream
from torchax_core.tensor import DEVICE, DEVICE_TYPE, Tensor
from torchax_core.variants import find_op, op_name
from torchax_core.view import View

__all__ = ["register", "register_factories"]

_library: torch.library.Library | None = None
_registered: set[str] = set()


class _DeviceModule(types.ModuleType):
    """`torch.jax`: what torch and users ask of a device. One logical device; placement is jax's sharding."""

    _initialized = True  # torch.utils.checkpoint keeps the random state of devices that have this

    def __init__(self) -> None:
        super().__init__("torch.jax", "The device 'jax' (torchax).")

    def is_available(self) -> bool:
        """Always: JAX has at least its CPU."""
        return True

    def is_initialized(self) -> bool:
        """Always; JAX starts its backend when first used."""
        return True

    def init(self) -> None:
        """Nothing to do."""

    def _is_in_bad_fork(self) -> bool:
        return in_bad_fork()

    def device_count(self) -> int:
        """1: one logical device, however many chips its arrays are sharded over."""
        return 1

    def current_device(self) -> int:
        """0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Only device 0 exists; anything else raises RuntimeError."""
        index = torch.device(device).index if not isinstance(device, int) else device
        if index not in (None, 0):
            raise RuntimeError(
                f"there is one device 'jax:0', but {device!r} was asked for; placement is by jax sharding."
            )

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        """A block in which `device` is the current one; as with set_device, it can only be device 0."""
        self.set_device(device)
        return contextlib.nullcontext()

    def get_device_name(self, device: Any = None) -> str:
        """The kind of chip JAX drives ("TPU v5e", "NVIDIA H100", "cpu")."""
        return jax.devices()[0].device_kind

    def get_device_properties(self, device: Any = None) -> Any:
        """Name, platform, number of chips and their memory in bytes (None where JAX does not tell)."""
        devices = jax.devices()
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        return types.SimpleNamespace(
            name=devices[0].device_kind, platform=devices[0].platform, count=len(devices), total_memory=limit
        )

    def get_device_capability(self, device: Any = None) -> None:
        """None: capabilities in cuda's sense do not exist here."""
        return None

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything dispatched so far has run."""
        jax.effects_barrier()
        for d in jax.local_devices():
            jax.block_until_ready(jax.device_put(0.0, d) + 0)

    Event = Event
    Stream = Stream
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    stream = staticmethod(stream)

    def manual_seed(self, seed: int) -> None:
        """Seed the random key of every environment."""
        from torchax_core.environment import Environment

        for reference in list(Environment._all):
            environment = reference()
            if environment is not None:
                environment.random.seed(seed)

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Seed with a random number from the CPU generator."""
        self.manual_seed(torch.seed())

    seed_all = seed

    def initial_seed(self) -> int:
        """The seed of the active environment."""
        return self._environment().random.initial

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The active environment's random state, a uint8 CPU tensor."""
        return self._environment().random.get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Put back what get_rng_state gave."""
        self._environment().random.set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """[get_rng_state()]."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: Any) -> None:
        """Put back what get_rng_state_all gave."""
        for state in new_states:
            self.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes of torch.autocast("jax", dtype=...). Asked when autocast is entered, so the policies are put in here."""
        from torchax_core.amp import install

        install(self._environment())
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_bf16_supported(self) -> bool:
        """True."""
        return True

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """What JAX tells of the first chip's memory, in bytes; empty on CPU."""
        return dict(jax.devices()[0].memory_stats() or {})

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes in live arrays."""
        stats = self.memory_stats()
        return stats["bytes_in_use"] if "bytes_in_use" in stats else sum(a.nbytes for a in jax.live_arrays())

    def max_memory_allocated(self, device: Any = None) -> int:
        """Peak bytes in use, where JAX tells it; else the bytes in live arrays."""
        return self.memory_stats().get("peak_bytes_in_use", self.memory_allocated())

    def empty_cache(self) -> None:
        """Nothing to do: JAX frees an array with its last reference."""

    @staticmethod
    def _environment() -> Any:
        from torchax_core.environment import current_env

        return current_env()


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined,misc]
    # C++ asks several times for each gradient of a backward; this is answered without running a Python function
    type_ = itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__


def register() -> None:
    """Make the name "jax" a torch device, `torch.jax` its module, and this package its kernels."""
    global _library
    if _library is not None:
        return
    current = torch._C._get_privateuse1_backend_name()
    if current not in ("privateuseone", DEVICE_TYPE):
        raise ImportError(
            f"torch's one slot for a device from outside (PrivateUse1) is taken by {current!r}; torchax_core needs it for "
            "'jax'. Use the two in separate processes."
        )
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, _DeviceModule(), hook=_Hooks(), device_guard=_Guard())
    _library = torch.library.Library("aten", "IMPL")  # noqa: TOR901 - kept alive for as long as the process
    torch.serialization.register_package(15, _tag, _restore)
    # torch.tensor(..., device="jax") makes a CPU tensor, tells modes of it, and moves that; without this, modes (fake tensors,
    # graphs being traced) hear of the moved one only, which is a real tensor. Where there is no mode, the result is the same.
    torch._C._set_only_lift_cpu_tensors(True)
    refuse_layouts()
    let_storages_be_freed()
    let_tensors_have_addresses()
    refuse_storages()
    let_bytes_be_copied()
    let_generators_be_made()
    for name in ("aten::empty.memory_format", "aten::empty_strided", "aten::_copy_from", "aten::_copy_from_and_resize"):
        _register(find_op(name))
    _library.impl("_pin_memory", _pin_memory, "CPU")
    _take_part_in_foreach()
    keep_parameters(_library)
    make_lazy_here()
    run_backwards_here()
    announce_backend()
    # make_fx (torch.func.linearize) records constants of these types, and takes what becomes of others for constant, too
    proxies.HANDLED_TYPES += (Tensor, View)  # type: ignore[assignment]
    for kind in (Tensor, View):
        torch.utils.data._utils.collate.default_collate_fn_map[kind] = _collate


def _take_part_in_foreach() -> None:
    """Let optimizers and `clip_grad_norm_` choose their foreach form for tensors of ours, as they do on every accelerator:
    one program for all parameters. torch asks for the exact type; subclasses are added to its lists, as DTensor is."""
    for supported in (of_optimizers, of_utilities):
        supported += [cls for cls in (Tensor, View) if cls not in supported]


def _collate(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """What a DataLoader makes of rows on device "jax". torch's own way, in a worker, allocates shared memory for the batch,
    of which there is none on this device."""
    return torch.stack(batch)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy in ordinary memory: JAX has no pinned host memory to copy from, and `DataLoader(pin_memory=True)` asks for it
    on every accelerator. torch's own, which asks the device's C++ hooks for an allocator, is for other devices."""
    if device is None or torch.device(device).type == DEVICE_TYPE:
        return self.clone()
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return torch.ops.aten._pin_memory.default._op_dk(key, self, device)


def _tag(storage: Any) -> str | None:
    return DEVICE_TYPE if storage.device.type == DEVICE_TYPE else None


class _LoadedStorage(torch.UntypedStorage):
    """CPU bytes on their way to device "jax": torch.load asks a storage for its device, then makes a tensor there."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


def _restore(storage: torch.UntypedStorage, location: str) -> Any:
    if not location.startswith(DEVICE_TYPE):
        return None
    loaded = _LoadedStorage(storage.nbytes())
    loaded.copy_(storage, False)
    return loaded


def _register(func: Any) -> None:
    name = op_name(func)
    if name in _registered or _library is None:
        return

    @entrance
    def factory(*args: Any, **kwargs: Any) -> Any:
        return Tensor.__torch_dispatch__(func, (), args, kwargs)

    _library.impl(name.partition("::")[2], factory, "PrivateUse1")
    _registered.add(name)


def register_factories(names: Any) -> None:
    """Route ops without a tensor argument (zeros, arange, randn) straight to the definitions that packs have for them."""
    for name in names:
        func = find_op(name)
        if func is None or name in _registered:
            continue
        arguments = func._schema.arguments
        if any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments):
            _register(func)
