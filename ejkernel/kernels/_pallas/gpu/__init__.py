"""Pallas Mosaic GPU: kernels for Hopper."""
