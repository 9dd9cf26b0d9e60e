"""The page as a document, and the files of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need
from ejkernel.lab.page import figures, sections
from ejkernel.lab.page.files import put
from ejkernel.lab.page.series import THEME, device


def write(result: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the report: ``index.html``, which holds everything, ``report.json``, and the plots as PNG and SVG.

    Args:
        result: what the report collected.
        folder: where to; made where it is missing. Files of an earlier report in it are replaced.

    Returns:
        The page.

    Raises:
        InvalidInputError: the folder cannot be written, or the result is not JSON; nothing is written then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write({"machine": {"device": "cpu"}, "kernels": []}, folder).name
        'index.html'
    """
    text = as_json(result)
    plots = figures.render(result)
    files = {**plots, "report.json": text.encode(), "index.html": _render(result).encode("utf-8", "replace")}
    every = {f"{kind}.{suffix}" for kind in ("latency", "memory", "roofline") for suffix in ("svg", "png")}
    put(folder, files, stale=every - set(plots))
    return Path(folder) / "index.html"


def as_json(result: Any) -> str:
    """A result as JSON, which has no NaN and no infinity: their names stand for them.

    Raises:
        InvalidInputError: for what JSON cannot hold.

    Example:
        >>> print(as_json({"error": float("inf")}))
        {
         "error": "inf"
        }
    """
    try:
        return json.dumps(_finite(result), indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"result: expected what JSON can hold, got something else: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _render(result: Mapping[str, Any]) -> str:
    jinja2 = need("jinja2", "the report's page")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ejkernel.lab.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # not sorted
    found = {name: getattr(sections, name)(result) for name in ("speed", "roofline", "kernels", "correctness", "times")}
    machine = result.get("machine") or {}
    return environment.get_template("page.html").render(
        device=device(result),
        version=machine.get("ejkernel"),
        facts=sections.machine_facts(machine),
        cards=sections.headline(result),
        sections={name: section for name, section in found.items() if section},
        result=_finite(result),
        theme=THEME,
    )
