"""Kernels in Triton, for NVIDIA and AMD GPUs; on a CPU they run in Triton's interpreter."""
