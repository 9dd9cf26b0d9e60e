"""Files that are written: whether they can be, asked before any work, and several of them, all or none."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def can_write(path: str | os.PathLike, option: str = "--output") -> None:
    """Raise, before any work, where a file cannot be written; ``option`` is what named it."""
    folder = Path(path).absolute().parent
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        if Path(path).is_dir():
            raise IsADirectoryError("it is a folder")
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise InvalidInputError(
            f"{option} is {os.fspath(path)!r}: no file can be written there ({error.strerror or error}); name another place."
        ) from error


def picture(figure: Any, kind: str = "png", **options: Any) -> bytes:
    """A figure of matplotlib as the content of a file; ``options`` are those of its ``savefig``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind.lstrip("."), **options)
    return buffer.getvalue()
