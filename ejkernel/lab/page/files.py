"""Writing several files, all or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ejkernel.errors import InvalidInputError


def put(folder: str | Path, files: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write all files or none, and remove the `stale` ones of an earlier time.

    They are written to a folder inside the given one first, and then renamed.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     put(folder, {"a.txt": b"a"})
        ...     os.listdir(folder)
        ['a.txt']
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if (folder / name).is_dir():
                raise IsADirectoryError(f"{name} in it is a folder")
        with tempfile.TemporaryDirectory(prefix=".ejkernel-", dir=folder) as beside:
            for name, content in files.items():
                Path(beside, name).write_bytes(content)
            for name in files:
                os.replace(Path(beside, name), folder / name)
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidInputError(
            f"folder: {str(folder)!r} cannot be written ({why}); expected a folder to write to: name another"
        ) from error
