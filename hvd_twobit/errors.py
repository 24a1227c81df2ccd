"""The exceptions of hvd_twobit: one base class, one subclass per kind of mistake.

Every message names what clashed (the tensor, the rank, the value found) and what to do about it. The subclasses
also inherit from the built-in exception that a caller would expect, so that ``except ValueError`` keeps working.
"""


class TwoBitError(Exception):
    """Base class of every error that hvd_twobit raises on purpose."""

    ag_pass_through = True  # Or AutoGraph raises a StagingError instead, which no ``except TwoBitError`` catches.


class ConfigError(TwoBitError, ValueError):
    """A parameter of ``TwoBit`` or a key of ``TwoBit.from_params`` is unknown, or its value cannot be used."""


class PayloadError(TwoBitError, ValueError):
    """Bytes received from a rank are not a payload of the tensor that they are meant for."""


class DisagreementError(TwoBitError, RuntimeError):
    """Ranks that exchange one optimizer's gradients would not send the same collectives."""


class ResidualError(TwoBitError, ValueError):
    """A residual does not fit the tensor of its name, or a state dictionary does not fit the registry."""


class UnsupportedOperationError(TwoBitError, NotImplementedError):
    """Something that Horovod offers and 2-bit compression cannot do (Adasum, complex gradients)."""


class RequirementError(TwoBitError, ImportError):
    """What a front end needs is not installed, or does not load: its framework, or Horovod compiled against it."""


class WrongImportError(TwoBitError, ImportError):
    """Something was looked for in ``hvd_twobit`` that each front end has its own of."""


class UnsupportedHorovodError(TwoBitError, ImportError):
    """The installed Horovod is not one whose internals hvd_twobit knows."""
