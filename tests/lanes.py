"""Which parameters of a test ``make test`` runs."""

import pytest


def some(values, *short):
    """All values as parameters of a test, those that are not ``short`` marked slow."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.slow) for value in values]
