"""How far from float64 an implementation may be, by dtype: one place for the whole suite.

Errors are measured against the largest magnitude in the result, for inputs of scale 1. Half precision rounds the inputs'
products and the result itself; the gradients sum more of both.
"""

import numpy as np

RELATIVE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
GRADIENT = {"float64": 1e-11, "float32": 5e-5, "float16": 1e-2, "bfloat16": 5e-2}
# Between two runs of one kernel: under a transformation what is around it may be rounded elsewhere.
REPEATED = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def assert_close(actual, expected, dtype, *, gradient=False, what=""):
    """Compare with float64, infinities included."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], err_msg=what)
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    error = np.abs(actual[finite] - expected[finite]).max(initial=0.0) / scale
    bound = (GRADIENT if gradient else RELATIVE)[str(dtype)]
    assert error <= bound, f"{what}: error {error:.2e} above {bound:.0e} for {dtype}"


def assert_same(actual, expected, dtype, *, what=""):
    """Compare two runs of one kernel."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    bound = REPEATED[str(dtype)]
    np.testing.assert_allclose(actual, expected, rtol=bound, atol=bound, err_msg=what)
