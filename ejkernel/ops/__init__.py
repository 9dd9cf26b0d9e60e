"""The operations: what each computes, bound and selected here, run by ``ejkernel.kernels``."""
