"""The report as one HTML page that needs nothing else: no network, no other file."""

from ejkernel.lab.page.comparison import Comparison, compare
from ejkernel.lab.page.document import as_json, write, write_comparison

__all__ = ["Comparison", "as_json", "compare", "write", "write_comparison"]
