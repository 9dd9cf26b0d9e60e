"""Pallas kernels for TPUs, v4 to tpu7x."""
