"""The errors of the library: one root, two causes; and what they say about a missing package."""


def how_to_install(extra: str) -> str:
    """What to run so that the packages of an extra are there.

    It names a clone, because ``ejkernel`` on the package index is another project.

    Example:
        >>> how_to_install("gpu")
        "pip install '.[gpu]' in a clone of ejkernel"
    """
    return f"pip install '.[{extra}]' in a clone of ejkernel"


class EjkernelError(Exception):
    """Root of every error that the library raises on purpose."""


class UnsupportedError(EjkernelError, NotImplementedError):
    """The call is meaningful, but no admissible implementation can run it here."""


class InvalidInputError(EjkernelError, ValueError):
    """An argument is wrong: the message names it, says what it was, what was expected and what to do."""


class MissingPackageError(EjkernelError, ImportError):
    """A package that a part of the library needs is not installed."""
