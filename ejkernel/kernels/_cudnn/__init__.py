"""Kernels of NVIDIA's cuDNN."""
