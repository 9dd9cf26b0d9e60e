"""Block-sparse attention for TPUs: the kernel of flash attention with a list of the mask's blocks."""
