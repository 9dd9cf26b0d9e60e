"""Kernels in CUDA C++, built on first use and called through XLA's FFI; docs/cuda.md says how."""
