"""The errors of the library: one root, two causes."""


class EjkernelError(Exception):
    """Root of every error that the library raises on purpose."""


class UnsupportedError(EjkernelError, NotImplementedError):
    """The call is meaningful, but no admissible implementation can run it here."""


class InvalidInputError(EjkernelError, ValueError):
    """An argument is wrong: the message names it, says what it was, what was expected and what to do."""
