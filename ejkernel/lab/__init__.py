"""The lab: where kernels are looked at. So far the report behind ``ejkernel report``."""
