"""The kernels, one folder a platform; operations reach them through the registry."""
