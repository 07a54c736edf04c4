"""Lets the tests run before the pack is installed: it is then taken from src/, and offered as its entry point would."""

import importlib.metadata
import sys
from pathlib import Path

from torchax_core.packs import GROUP, host

if "example_pack" not in {point.name for point in importlib.metadata.entry_points(group=GROUP)}:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    host().offer("example_pack", "example_pack.pack")
