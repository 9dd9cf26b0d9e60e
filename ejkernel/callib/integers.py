"""Powers of two beside a size."""

__all__ = ["power_of_two", "power_of_two_below"]


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``.

    Example:
        >>> [power_of_two(size) for size in (0, 1, 3, 4, 5)]
        [1, 1, 4, 4, 8]
    """
    return 1 << max(0, size - 1).bit_length()


def power_of_two_below(size: int) -> int:
    """The largest power of two that is at most ``size``, which is at least 1.

    Example:
        >>> [power_of_two_below(size) for size in (1, 3, 4, 5)]
        [1, 2, 4, 4]
    """
    return 1 << (size.bit_length() - 1)
