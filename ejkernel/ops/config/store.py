"""The user's store of measurements: one JSON file an entry, written atomically under a lock.

Nothing that is wrong with the store stops a call: a damaged entry, an unreadable or a full directory costs one warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import filelock

from ejkernel.contracts.params import params_class
from ejkernel.ops.utils.fingerprint import short_hash, stable_json
from ejkernel.utils.directories import cache_directory

FORMAT = 1
LOCK_SECONDS = 10.0

_warned: set[str] = set()


def path_of(key: dict[str, Any]) -> Path:
    """Where an entry lives."""
    return cache_directory() / "tuned" / f"{key['operation']}-{short_hash(key)}.json"


def read(key: dict[str, Any]) -> dict[str, Any] | None:
    """An entry's value, ``{"params": {...}, "seconds": ...}``; None if there is none that can be used."""
    path = path_of(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(path, f"cannot be read ({error}); it is ignored")
        return None
    try:
        entry = json.loads(text)
        damage = _damage(entry, key)
    except (ValueError, RecursionError) as error:
        damage = f"is not JSON ({error})"
    if damage:
        _warn(path, f"{damage}; it is ignored")
        return None
    return entry["value"]


def write(key: dict[str, Any], value: dict[str, Any]) -> bool:
    """Keep a value; False, after a warning, if that is not possible."""
    path = path_of(key)
    text = json.dumps({"format": FORMAT, "key": json.loads(stable_json(key)), "value": value}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.parent / ".lock", timeout=LOCK_SECONDS):
            _replace(path, text)
    except (OSError, filelock.Timeout) as error:
        _warn(
            path, f"cannot be written ({error}), so the measurement is kept for this process only", once_for=path.parent
        )
        return False
    return True


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _damage(entry: Any, key: dict[str, Any]) -> str | None:
    """What makes an entry unusable."""
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        return "has another format"
    if entry.get("key") != json.loads(stable_json(key)):
        return "was written for another call"
    value = entry.get("value")
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if not isinstance(seconds, float) or not math.isfinite(seconds) or seconds <= 0:
        return "holds no time"
    try:
        params_class(key["direction"])(**value["params"])
    except (KeyError, TypeError, ValueError) as error:
        return f"holds wrong parameters ({error})"
    return None


def _warn(path: Path, what: str, once_for: Path | None = None) -> None:
    about = str(once_for or path)
    if about in _warned:
        return
    _warned.add(about)
    warnings.warn(f"ejkernel's tuning entry {path} {what}.", stacklevel=2)
