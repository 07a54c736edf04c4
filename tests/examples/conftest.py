"""Lets the tests import the examples and benchmarks, which are scripts and in no package."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "benchmarks")]
