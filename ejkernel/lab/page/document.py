"""The page as a document, and the files of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel import __version__
from ejkernel.errors import InvalidInputError
from ejkernel.lab.extras import need
from ejkernel.lab.files import put
from ejkernel.lab.page import beside, figures, sections
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
    files = {**plots, "report.json": text.encode(), "index.html": _report(result).encode("utf-8", "replace")}
    every = {f"{kind}.{suffix}" for kind in ("latency", "memory", "roofline") for suffix in ("svg", "png")}
    put(folder, files, stale=every - set(plots))
    return Path(folder) / "index.html"


def write_comparison(result: Mapping[str, Any], folder: str | Path) -> Path:
    """Write two reports side by side: ``index.html``, which holds everything, and ``comparison.json``.

    Args:
        result: what ``ejkernel.lab.side_by_side.beside`` made of them.
        folder: where to, as for ``write``.

    Returns:
        The page.

    Raises:
        InvalidInputError: the folder cannot be written; nothing is written then.
    """
    text = as_json(result)
    put(folder, {"comparison.json": text.encode(), "index.html": _comparison(result).encode("utf-8", "replace")})
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


TITLES = {
    "speed": "Speed",
    "roofline": "Roofline",
    "kernels": "Kernels",
    "correctness": "Correctness",
    "times": "Times",
    "beside_speed": "Speed",
    "beside_kernels": "Kernels",
    "beside_correctness": "Correctness",
    "beside_versions": "Versions",
}


def _report(result: Mapping[str, Any]) -> str:
    names = ("speed", "roofline", "kernels", "correctness", "times")
    machine = result.get("machine") or {}
    return _render(
        {name: getattr(sections, name)(result) for name in names},
        brand="ejkernel report",
        heading=[device(result)],
        facts=[sections.machine_facts(machine)],
        cards=sections.headline(result),
        version=machine.get("ejkernel"),
        result=_finite(result),
        file="report.json",
        data="All of the above as JSON, to put beside another machine’s: ejkernel report --compare.",
    )


def _comparison(result: Mapping[str, Any]) -> str:
    names = ("beside_speed", "beside_kernels", "beside_correctness", "beside_versions")
    return _render(
        {name: getattr(beside, name)(result) for name in names},
        brand="ejkernel report --compare",
        heading=beside.heading(result),
        facts=beside.facts(result),
        cards=beside.headline(result),
        version=__version__,
        result=_finite(result),
        file="comparison.json",
        data="All of the above as JSON.",
    )


def _render(found: Mapping[str, Any], **parts: Any) -> str:
    jinja2 = need("jinja2", "the report's page")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ejkernel.lab.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # not sorted
    shown = {name: section for name, section in found.items() if section}
    titles = {name: TITLES[name] for name in shown}
    return environment.get_template("page.html").render(sections=shown, titles=titles, theme=THEME, **parts)
