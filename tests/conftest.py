"""What all tests share: the device, a fixed seed, and an environment of one's own for those that ask for it."""

import resource
import sys

import pytest
import torch

import torchax_core
from torchax_core.kernel import forget_signatures


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, on both devices."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Thousands of small programs are compiled by these tests; those of a module are of no use to the next."""
    yield
    if _resident_bytes() > 3 * 2**30:
        torchax_core.clear_caches()


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux: the peak will do
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture
def env():
    """A fresh environment, active during the test: overrides and settings in it end with it."""
    with torchax_core.Environment() as environment:
        yield environment


@pytest.fixture
def new_signatures():
    """Every call's signature is new to its op, as values are looked at only then."""
    forget_signatures()
