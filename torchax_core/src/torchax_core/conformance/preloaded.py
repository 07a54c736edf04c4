"""Imported by the process that workers are forked from, so that none of them has to import torch's op database itself."""

from torchax_core.conformance import running, workers  # noqa: F401
from torchax_core.conformance.ops import op_db

op_db()
