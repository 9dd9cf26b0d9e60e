"""Keys and parameters: `fingerprint` names devices and values, `datacarrier` holds a kernel's parameters."""
