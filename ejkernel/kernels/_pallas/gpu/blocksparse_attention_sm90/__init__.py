"""Block-sparse attention for Hopper (sm_90): flash attention's forward kernel, whose steps come from a list of blocks.

``attention`` declares it, ``forward`` plans a call on the host, ``block`` is what differs in the kernel."""
