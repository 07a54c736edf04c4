"""Lets the tests here import the zoo, which is a command as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
