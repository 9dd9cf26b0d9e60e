"""Flash attention for Hopper (sm_90) in Pallas Mosaic GPU.

``attention`` declares the kernel. ``forward`` and ``gradients`` plan a call on the host, ``plan`` is what they share;
the other modules are the kernels and import Mosaic GPU, so they are imported only when a call is traced."""
