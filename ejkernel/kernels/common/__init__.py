"""What kernels of several platforms share: which pairs count, dropout, statistics of the softmax, mesh axes."""
