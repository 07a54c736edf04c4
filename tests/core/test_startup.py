"""What is done while torchax starts: collections of garbage are put off, and go on afterwards."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from torchax_core.startup import without_collections


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collecting(request):
    """Python's collector, as the user has set it."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_collector_is_left_as_it_was(collecting):
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is collecting


def test_the_collector_is_left_as_it_was_by_an_error(collecting):
    with pytest.raises(ImportError), without_collections():
        raise ImportError("a pack")
    assert gc.isenabled() is collecting


def test_the_first_op_leaves_the_collector_on():
    torch.ones(2, device="jax") + 1
    assert gc.isenabled()


def test_torch_has_imported_what_it_does_at_a_first_op():
    torch.ones(2, device="jax") + 1
    assert "torch.distributed.tensor" in sys.modules
