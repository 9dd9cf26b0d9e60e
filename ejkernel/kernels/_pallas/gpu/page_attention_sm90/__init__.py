"""Paged attention for Hopper (sm_90): flash attention's forward kernel, whose producer reads keys page by page.

``attention`` declares it, ``forward`` plans a call on the host, ``block`` is what differs in the kernel."""
