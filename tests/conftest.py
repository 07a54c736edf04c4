"""What all tests share: the device, a fixed seed, and an environment of one's own for those that ask for it."""

import pytest
import torch

import torchax_core


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, on both devices."""
    torch.manual_seed(0)


@pytest.fixture
def env():
    """A fresh environment, active during the test: overrides and settings in it end with it."""
    with torchax_core.Environment() as environment:
        yield environment
