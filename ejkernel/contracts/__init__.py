"""What kernels and operations both know: devices, ``Support``, parameters, bound calls, the ``Kernel`` protocol, the registry."""
