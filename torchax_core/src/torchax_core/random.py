"""Random numbers: a jax key and a count of the draws made from it. Same seed, same numbers, eager or jitted.

The n-th random op after seeding uses `fold_in(key, n)`, folded inside the op's own compiled function, so a draw costs no
dispatch of its own. Under `torchax_core.jit` key and count are inputs, and the count moves on by the draws in the step.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from torchax_core.tensor import active

__all__ = ["RandomState"]


class RandomState:
    """The key and draw count of an environment."""

    def __init__(self, seed: int, impl: str) -> None:
        self.impl = impl
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start anew. Any int64 or uint64; both halves count."""
        seed = int(seed) & 0xFFFF_FFFF_FFFF_FFFF
        self.initial = seed
        self.count = 0
        self._key: Any = None

    @classmethod
    def of_key(cls, key: jax.Array, impl: str) -> RandomState:
        """Draws from a jax key, of jax.random.key or jax.random.PRNGKey, traced or not. It has no seed to save."""
        if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if str(jax.random.key_impl(key)) != impl:
            key = jax.random.key(jax.random.bits(key), impl=impl)
        state = cls(0, impl)
        state._key = key
        state.initial = None  # type: ignore[assignment]
        return state

    @property
    def key(self) -> jax.Array:
        """The jax key of the present seed."""
        if self._key is None:
            low, high = self.initial & 0xFFFF_FFFF, self.initial >> 32
            with jax.ensure_compile_time_eval():
                if self.impl == "threefry2x32" and not high:
                    # what jax.random.key computes, without compiling it
                    self._key = jax.random.wrap_key_data(np.array([0, low], np.uint32), impl=self.impl)
                else:
                    key = jax.random.key(np.uint32(low), impl=self.impl)
                    self._key = jax.random.fold_in(key, np.uint32(high)) if high else key
        return self._key

    def arguments(self, generator: Any) -> tuple[Any, Any]:
        """Key and count for one draw, as a kernel takes them."""
        if generator is not None:
            if active.trace is not None:
                before = generator.get_state()  # each call draws; tracing does not
                drawn = active.trace.host_input(lambda: _from_generator(generator, self.impl))
                generator.set_state(before)
                return drawn, np.uint32(0)
            return _from_generator(generator, self.impl), np.uint32(0)
        if active.trace is not None:
            return active.trace.random_arguments(self)
        count = self.count
        self.count = count + 1
        return self.key, np.uint32(count & 0xFFFF_FFFF)

    def get_state(self) -> torch.Tensor:
        """The state as 16 bytes: seed and count, a uint8 CPU tensor like torch.get_rng_state's.

        Raises RuntimeError while a jax key stands in for the seed.
        """
        if self.initial is None:
            raise RuntimeError("random numbers come from a jax key here (override_property(prng=...)); save that key.")
        return torch.from_numpy(np.array([self.initial, self.count], np.uint64).view(np.uint8).copy())

    def set_state(self, state: torch.Tensor) -> None:
        """Put back what get_state gave. ValueError for anything else."""
        if state.dtype is not torch.uint8 or state.numel() != 16:
            raise ValueError(
                f"expected the 16-byte uint8 tensor of torch.jax.get_rng_state(), but got {state.dtype} of shape "
                f"{tuple(state.shape)}."
            )
        seed, count = (int(v) for v in state.cpu().numpy().view(np.uint64))
        self.seed(seed)
        self.count = count


def _from_generator(generator: torch.Generator, impl: str) -> jax.Array:
    """A key drawn from a CPU generator, which moves on by one draw."""
    draw = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, dtype=torch.int64, device="cpu").item()
    with jax.ensure_compile_time_eval():
        low, high = int(draw) & 0xFFFF_FFFF, (int(draw) >> 32) & 0xFFFF_FFFF
        return jax.random.fold_in(jax.random.key(np.uint32(low), impl=impl), np.uint32(high))
