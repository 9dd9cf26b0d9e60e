"""Kernels in plain XLA, for every device."""
