"""metadata.py: questions and checks."""

import pytest
import torch


def test_is_same_size():
    a, b = torch.zeros(2, 3, device="jax"), torch.zeros(3, 2, device="jax")
    assert torch.ops.aten.is_same_size(a, a) is True
    assert torch.ops.aten.is_same_size(a, b) is False


def test_assert_async_passes():
    torch._assert_async(torch.tensor(True, device="jax"))
    torch._assert_async(torch.ones(1, device="jax"), "message")


def test_assert_async_raises_once_the_program_has_run():
    import jax

    with pytest.raises(Exception, match="what went wrong"):
        torch._assert_async(torch.tensor(0, device="jax"), "what went wrong")
        jax.effects_barrier()
