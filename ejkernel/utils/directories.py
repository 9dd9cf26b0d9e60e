"""The directory for what is stored per user."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """``EJKERNEL_CACHE_DIR``, else the user's cache directory of the platform."""
    return Path(os.environ.get("EJKERNEL_CACHE_DIR") or platformdirs.user_cache_dir("ejkernel", appauthor=False))
