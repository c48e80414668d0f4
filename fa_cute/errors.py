"""Every exception that fa_cute raises on purpose.

A message says what was given, what is allowed and, where there is one, the nearest choice that
works. Each class also derives from the built-in exception that a caller would catch without knowing
this package.
"""

from __future__ import annotations


class FaCuteError(Exception):
    """Root of all exceptions of this package."""


class ArgumentError(FaCuteError, ValueError):
    """Shapes, dtypes, devices, strides or scalars that do not fit together."""


class UnsupportedError(FaCuteError, NotImplementedError):
    """A valid request for which there is no kernel (on this architecture, or at all)."""


class PlanError(FaCuteError, ValueError):
    """A kernel plan that contradicts itself or does not fit its architecture."""


class DeterminismError(FaCuteError, RuntimeError):
    """Bitwise repeatable results were asked for on a path that cannot give them."""


class CompileError(FaCuteError, RuntimeError):
    """The DSL or the assembler refused a kernel."""


class CompileDuringCaptureError(CompileError):
    """A kernel is not loaded yet while the stream is being captured into a CUDA graph."""


class SimError(FaCuteError, RuntimeError):
    """The simulated program did something that the hardware leaves undefined or forbids."""


class DeadlockError(SimError):
    """No warp can make progress and no asynchronous work is outstanding."""


class UninitializedReadError(SimError):
    """A read of memory that nothing wrote."""


class OutOfBoundsError(SimError):
    """An access outside a tensor, shared memory or allocated tensor memory."""


class UnknownInstructionError(SimError):
    """A PTX instruction that the simulator does not implement."""


class MisuseError(SimError):
    """An instruction used in a way whose result the PTX ISA does not define."""
