"""Every exception a user of torchax can meet. Each says which op, what was expected, what came in, and what to do.

Wrong shapes, dtypes, dims and devices are not here: those raise torch's own exceptions with torch's own wording, from
torch's meta kernels. docs/errors.md explains each class with a worked fix.
"""

from __future__ import annotations

__all__ = [
    "AccuracyError",
    "AccuracyWarning",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "ConversionError",
    "DataDependentError",
    "DuplicateOpError",
    "ForkedProcessError",
    "LeakedTracerError",
    "LoweringMismatchError",
    "NonFiniteError",
    "OpNameError",
    "OperatorNotFound",
    "PackError",
    "PackNameError",
    "PackWarning",
    "ShapeError",
    "SideEffectError",
    "SignatureError",
    "TorchaxError",
    "UnknownPackError",
    "ViewWriteError",
]


class TorchaxError(Exception):
    """The base of all exceptions of torchax."""


class OperatorNotFound(TorchaxError, NotImplementedError):
    """No override, pack or torch decomposition says how an op runs. Names the op, and the three lines that define it."""


class OpNameError(TorchaxError, ValueError):
    """An op's name is not of the form "namespace::name.overload", or no loaded torch library has it."""


class DuplicateOpError(TorchaxError, ValueError):
    """An op is defined twice, in one op set or by two packs of the same rank. Names both places."""


class SignatureError(TorchaxError, TypeError):
    """A definition's parameters do not fit its op's schema. Names the parameter, the schema and the file and line."""


class LoweringMismatchError(TorchaxError, RuntimeError):
    """A lowering returned another number or shape of results than torch's op does. Names the pack."""


class CollectiveError(TorchaxError, RuntimeError):
    """A collective that cannot run here: its group is no mesh axis in scope, its members disagree, or JAX has no such thing."""


class ShapeError(TorchaxError, RuntimeError):
    """Shapes that an op cannot take, found by a lowering where torch has no meta kernel to say so first."""


class PackError(TorchaxError, RuntimeError):
    """A pack, or a definition of it, could not be loaded. Names what, file and line; raised only if TORCHAX_STRICT=1."""


class PackNameError(TorchaxError, ValueError):
    """A new pack cannot be called so, or is there already. Says what a name must be like."""


class PackWarning(UserWarning):
    """A pack could not be loaded and was left out with all it had registered, or a definition of it does not fit and was."""


class UnknownPackError(TorchaxError, ValueError):
    """TORCHAX_PACKS or Config names a pack that is not installed. Suggests the nearest name."""


class ConfigError(TorchaxError, ValueError):
    """A setting has a value it cannot take. Names the field, the value and the choices."""


class AccuracyError(TorchaxError, RuntimeError):
    """An op gave another result than CPU torch does for the same inputs. Raised by debug.accuracy; names op and line."""


class AccuracyWarning(UserWarning):
    """As AccuracyError, where Config(debug_accuracy="warn") asks to go on."""


class NonFiniteError(TorchaxError, FloatingPointError):
    """An op made NaN (or inf) of inputs that have none. Raised by debug.nans and debug.infs; names op, inputs and line."""


class DataDependentError(TorchaxError, RuntimeError):
    """Traced code asked for a value that is known only when the program runs: `.item()`, `if tensor:`, `nonzero`.

    Names the line, and the ways out.
    """


class ForkedProcessError(TorchaxError, RuntimeError):
    """An op was called in a process forked from one that had already used JAX. Says how to start it instead."""


class LeakedTracerError(TorchaxError, RuntimeError):
    """A tensor made inside a jax trace was used after the trace had ended."""


class ViewWriteError(TorchaxError, RuntimeError):
    """A write to a view cannot be honoured: several of its elements share one place in the base."""


class SideEffectError(TorchaxError, RuntimeError):
    """Torch code inside a jax transformation wrote to a tensor that was not among its arguments. The write was undone."""


class CheckpointError(TorchaxError, RuntimeError):
    """A file or folder is no checkpoint, is damaged, or does not fit what it is loaded into. Nothing was changed."""


class ConversionError(TorchaxError, TypeError):
    """A value, dtype or layout has no counterpart on the other side. Names it, and the nearest that has."""
