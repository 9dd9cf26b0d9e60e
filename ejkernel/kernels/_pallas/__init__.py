"""Kernels written in Pallas."""
