"""Grouped matmul for Hopper GPUs, in Pallas Mosaic GPU; ``matmul`` declares it."""
