"""Ops that ask about tensors or check them, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from torchax_core.opset import OpSet

ops = OpSet("torchax_ops_aten.metadata")


@ops.decomposition("aten::is_same_size", whole=False)
def is_same_size(self, other):
    """Whether the shapes are equal, without broadcasting. returns: bool"""
    return self.shape == other.shape


def _raise_if_false(message: str) -> Callable[[np.ndarray], None]:
    def check(condition: np.ndarray) -> None:
        if not condition:
            raise RuntimeError(message)

    return check


@ops.lowering("aten::_assert_async", "aten::_assert_async.msg")
def assert_async(self, assert_msg="Expected Tensor with single nonzero value, but got zero"):
    """Raises `assert_msg` if the one element of `self` is 0: when the program has run, as on other accelerators."""
    jax.debug.callback(_raise_if_false(assert_msg), jnp.all(self != 0))
    return ()


@ops.lowering("aten::_functional_assert_async.msg")
def functional_assert_async(self, assert_msg, dep_token):
    """`_assert_async`, ordered by a token that it returns."""
    assert_async(self, assert_msg)
    return dep_token
