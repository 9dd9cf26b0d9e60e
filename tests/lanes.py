"""Which parameters of a test ``make test`` runs, and which CI leaves out."""

import pytest


def some(values, *short):
    """All values as parameters of a test, those that are not ``short`` marked slow."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.slow) for value in values]


def crossed(values, others, *, short=lambda value, other: False, again=lambda value, other: False):
    """Every value beside every other as parameters of a test.

    Those that are not ``short`` are marked slow. ``again`` says of which CI sees enough elsewhere. A dict's keys are the
    names of its values.
    """

    def named(values):
        return values.items() if isinstance(values, dict) else [(str(value), value) for value in values]

    def marks(value, other):
        return [
            *([] if short(value, other) else [pytest.mark.slow]),
            *([pytest.mark.again] if again(value, other) else []),
        ]

    return [
        pytest.param(value, other, id=f"{name}-{other_name}", marks=marks(value, other))
        for other_name, other in named(others)
        for name, value in named(values)
    ]
