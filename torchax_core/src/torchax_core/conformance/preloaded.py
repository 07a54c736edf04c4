"""Imported by the process that workers are forked from, so that none of them has to import torch's op database itself."""

import warnings

from torchax_core import builtins  # noqa: F401  # the core imports it late, which must not be from changed sources
from torchax_core.conformance import running, workers  # noqa: F401
from torchax_core.conformance.ops import op_db

# a worker runs its parent's main module, which for `python -m torchax_core.testing` has been imported here
warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)

op_db()
