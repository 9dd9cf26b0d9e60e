"""What mkdocs builds the site from, beside the pages in docs/.

The README is the home page; CHANGELOG and CONTRIBUTING are pages. The API's pages are made from the package's own lists
of public names. Whatever else a page links to (results, plots, scripts) is copied. A page's links are written as a git
host needs them, relative to its place in the repository; here they are turned into the site's.
"""

import ast
import importlib
import posixpath
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# Files outside of docs/ that are pages.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
SOURCES = {page: source for source, page in PAGES.items()}
# Links in Markdown: an image or a link up to its closing bracket.
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
CODE = re.compile(r"^(```.*?^```|<!--.*?-->)", re.DOTALL | re.MULTILINE)


# The API's pages


def sections():
    """``{page: (title, what stands above, identifiers)}`` of every public name, by the module that it lives in."""
    import ejkernel

    pages = {
        "operations": ("Operations", "All work under `jit`, `grad`, `vmap`, `jax.checkpoint`, `shard_map` and `jax.export`.", []),
        "selection": ("Selection", "Which implementation runs a call, and how to add one.", []),
        "tuning": ("Parameters and tuning", "How a kernel runs, and for which device: [where parameters come from](../tuning.md).", []),
        "errors": ("Errors", "Each error names the argument, what it was, what was expected, and what to do.", []),
        "utilities": ("Utilities", "Functions that kernels and the code around them need; an [overview](../utilities.md).", []),
        "lab": ("Lab", "Timers, rooflines, plots and studies of a model; an [overview](../lab.md). All are names of `ejkernel.lab`.", []),
        "integrations": ("Integrations", "One module for each framework, importable only with it installed.", []),
    }  # fmt: skip
    for name in ejkernel.__all__:
        home = ejkernel._HOMES.get(name, "ejkernel.ops")
        pages[_page_of(home)][2].append(f"ejkernel.{name}")
    pages["selection"][2].extend(
        [
            "ejkernel.contracts.registry.KernelRegistry",
            "ejkernel.contracts.registry.Implementation",
            "ejkernel.ops.core.select.Explanation",
            "ejkernel.ops.core.select.Candidate",
            "ejkernel.contracts.kernel.Kernel",
            *(f"ejkernel.contracts.support.{name}" for name in ("any_device", "cpu", "gpu", "cuda", "rocm", "tpu", "multiple_of")),
            "ejkernel.contracts.device.DeviceInfo",
        ]
    )  # fmt: skip
    for module in ("xla_utils", "ops.utils.fingerprint", "callib", "utils"):
        names = importlib.import_module(f"ejkernel.{module}").__all__
        pages["utilities"][2].extend(f"ejkernel.{module}.{name}" for name in names)
    pages["utilities"][2].extend(f"ejkernel.utils.bursts.{name}" for name in ("time_bursts", "BurstTimes"))
    from ejkernel import lab

    pages["lab"][2].extend(f"ejkernel.lab.{lab._MODULE_OF[name]}.{name}" for name in lab.__all__)
    folder = ROOT / "ejkernel" / "integrations"
    pages["integrations"][2].extend(
        f"ejkernel.integrations.{path.stem}" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")
    )
    return pages


def _page_of(home):
    """Where a name of the package itself is described."""
    if home == "ejkernel.errors":
        return "errors"
    if home == "ejkernel.contracts.params" or home.startswith("ejkernel.ops.config"):
        return "tuning"
    if home.startswith(("ejkernel.contracts", "ejkernel.ops.core")):
        return "selection"
    if home.startswith("ejkernel.ops"):
        return "operations"
    raise BuildError(f"docs/site/hooks.py: on which page of the API belongs what lives in {home}?")


def reference(title, words, identifiers):
    """A page of the API; of a module that lists its public names, these."""
    blocks = []
    for identifier in identifiers:
        names = listed(ROOT / f"{identifier.replace('.', '/')}.py")
        chosen = f"\n    options:\n      members: {names}" if names else ""
        blocks.append(f"::: {identifier}{chosen}")
    return "\n\n".join([f"# {title}", words, *blocks]) + "\n"


def listed(path):
    """The `__all__` of a module, which may need packages that are not installed."""
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


# mkdocs calls these


def on_files(files, config):
    """Adds what does not lie in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for name, (title, words, identifiers) in sections().items():
        if identifiers:
            files.append(File.generated(config, f"api/{name}.md", content=reference(title, words, identifiers)))
    linked = {target for file in files.documentation_pages() for target in outside(file)}
    for target in sorted(linked):
        copied = File.generated(config, target, abs_src_path=str(ROOT / target), inclusion=InclusionLevel.INCLUDED)
        files.append(copied)
    config.nav = present(config.nav, {file.src_uri for file in files})
    return files


def present(entries, pages):
    """Navigation without the entries whose file is not there."""
    kept = []
    for entry in entries:
        ((title, below),) = entry.items()
        if isinstance(below, list):
            below = present(below, pages)
        elif below not in pages:
            below = None
        if below:
            kept.append({title: below})
    return kept


def on_page_markdown(markdown, page, config, files):
    """A page's links as the site needs them, and a link to its part of the API."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]  # it would name this page alone
    if name.startswith("operations/"):
        operation = posixpath.basename(name).removesuffix(".md")
        head, _, rest = markdown.partition("\n")
        markdown = f"{head}\n\n[Signature and arguments](../api/operations.md#ejkernel.{operation})\n{rest}"
    source = source_of(name)

    def rewritten(match):
        target = repository_path(source, match[2])
        if target is None:
            return match[0]
        place, fragment = PAGES.get(target, target.removeprefix("docs/")), urlsplit(match[2]).fragment
        moved = posixpath.relpath(place, posixpath.dirname(name) or ".")
        link = f"{match[1]}{moved}{'#' * bool(fragment)}{fragment}{match[3]}"
        return f"[{link}]({moved})" if match[1].startswith("!") else link  # a plot opens in its own size

    # A comment would make Markdown take the table that follows it for HTML.
    parts = [
        part + "\n" * part.startswith("<!--") if i % 2 else LINK.sub(rewritten, part)
        for i, part in enumerate(CODE.split(markdown))
    ]
    return relisted("".join(parts))


def relisted(markdown):
    """Lists as this Markdown needs them: what belongs to an item indented by 4, a blank line after a longer item."""
    lines, width, blank, parts, fenced = [], 0, True, False, False
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced, width = not fenced, 0
        elif (item := re.match(r"[-*] +|\d+\. +", line)) and not fenced and (blank or width):
            lines += [""] * (parts and not blank)
            width, parts = len(item[0]), False
        elif line and not line.startswith(" " * width) and blank:
            width = 0
        inside = 0 < width < 4 and line.startswith(" " * width)
        parts |= inside and blank
        lines.append(" " * (4 - width) + line if inside else line)
        blank = not line
    return "\n".join(lines) + "\n"


# Links


def source_of(page):
    """Where a page lies in the repository."""
    return SOURCES.get(page, f"docs/{page}")


def repository_path(source, target):
    """The file of the repository that a link leads to; None for an address, an anchor, or a file that is not there."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))
    return path if (ROOT / path).is_file() and not path.startswith("..") else None


def outside(file):
    """Files of the repository that a page links to and that are neither pages nor in docs/."""
    source = source_of(file.src_uri)
    for i, part in enumerate(CODE.split(file.content_string)):
        for match in LINK.finditer(part) if i % 2 == 0 else ():
            path = repository_path(source, match[2])
            if path and path not in PAGES and not path.startswith("docs/"):
                yield path
