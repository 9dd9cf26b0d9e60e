"""The documentation site: it builds strictly, holds every public name, fetches nothing, and fits a phone."""

import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(__file__).parents[1]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs the extra docs: {', '.join(MISSING)} is not installed")


def build(root, folder):
    """Runs what `make site` runs."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stderr
    assert "excluded from the built site" not in result.stderr
    return folder


@functools.cache
def hooks():
    """The module that mkdocs calls."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fetched(HTMLParser):
    """The addresses that a page makes a browser fetch."""

    def __init__(self):
        super().__init__()
        self.found, self.ids = [], set()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object", "link"):
            self.found += [given[name] for name in ("src", "srcset", "href", "data", "poster") if given.get(name)]


def parsed(page):
    parser = Fetched()
    parser.feed(page.read_text())
    return parser


def test_the_site(site):
    """One test, for each worker that runs one of several would build the site."""
    nothing_is_fetched_from_elsewhere(site)
    every_public_name_is_described(site)
    every_page_of_the_repository_is_there(site)
    markdown_is_read_as_git_hosts_read_it(site)


def nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        outside = [address for address in parsed(page).found if re.match(r"(https?:)?//", address)]
        assert not outside, (page.name, outside)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[\s\"']*(https?:)?//", sheet.read_text()), sheet.name


def every_public_name_is_described(site):
    ids = set().union(*(parsed(page).ids for page in (site / "api").glob("*.html")))
    from ejkernel import callib, lab, utils, xla_utils
    from ejkernel.ops.utils import fingerprint

    wanted = {f"ejkernel.{name}" for name in ejkernel.__all__}
    wanted |= {f"ejkernel.patterns.{name}" for name in ejkernel.patterns.__all__}
    for module in (callib, utils, xla_utils, fingerprint):
        wanted |= {f"{module.__name__}.{name}" for name in module.__all__}
    wanted |= {f"ejkernel.lab.{lab._MODULE_OF[name]}.{name}" for name in lab.__all__}
    folder = ROOT / "ejkernel" / "integrations"
    own = {f"ejkernel.integrations.{path.stem}.{name}" for path in folder.glob("*.py") for name in hooks().listed(path)}
    assert not sorted((wanted | own) - ids)
    of_integrations = {name for name in ids if name and re.fullmatch(r"ejkernel\.integrations\.\w+\.\w+", name)}
    assert of_integrations == own  # what the modules share among themselves is not public


def pages_of_the_repository():
    """The built page of each source."""
    pages = {"README": "index", "CHANGELOG": "changelog", "CONTRIBUTING": "contributing"}
    found = {ROOT / f"{name}.md": f"{page}.html" for name, page in pages.items()}
    docs = ROOT / "docs"
    return found | {page: page.relative_to(docs).with_suffix(".html").as_posix() for page in docs.rglob("*.md")}


def every_page_of_the_repository_is_there(site):
    assert not sorted(name for name in pages_of_the_repository().values() if not (site / name).is_file())
    home = (site / "index.html").read_text()
    assert "behind one API on every device" in home
    assert 'href="operations/flash_attention.html"' in home
    assert (site / "benchmarks" / "results" / "pallas_h200.png").is_file()
    assert "flash_attention" in (site / "search" / "search_index.json").read_text()


def markdown_is_read_as_git_hosts_read_it(site):
    """Both find as many items, tables, blocks of code and headings."""
    markdown_it = pytest.importorskip("markdown_it")
    reader = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")
    for source, name in pages_of_the_repository().items():
        article = re.search(r"<article.*?</article>", (site / name).read_text(), re.DOTALL)[0]
        expected, found = (
            Counter(re.findall(r"<(li|ol|ul|table|tr|pre|img|h[1-6])\b", html))
            for html in (reader.render(source.read_text()), article)
        )
        assert found == expected, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# A page\n\n[nowhere](operations/missing.md)\n", "operations/missing.md"),
        ("# A page\n\n[no such part](tuning.md#no-such-part)\n", "no-such-part"),
        ("# A page\n\n::: ejkernel.no_such_name\n", "ejkernel.no_such_name"),
        ("# A page\n", "not included in the"),
    ],
)
def test_what_is_broken_fails_the_build(tmp_path, text, said):
    """In a copy: a page with a bad link, anchor or reference, and one that the navigation does not list."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "site", "tests", "__pycache__", ".*_cache")
    )
    shutil.copytree(ROOT / "docs" / "site", copy / "docs" / "site")
    (copy / "docs" / "page.md").write_text(text)
    if "included" not in said:
        config = copy / "mkdocs.yml"
        config.write_text(config.read_text() + "  - A page: page.md\n")
    result = build(copy, tmp_path / "site")
    assert result.returncode != 0
    assert said in result.stderr


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_screen_and_search_finds(site, width, scheme):
    sync = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync.sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base, asked = f"http://127.0.0.1:{server.server_port}/", []
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index", "operations/flash_attention", "api/operations", "benchmarks", "features"):
            page.goto(f"{base}{name}.html")
            page.wait_for_load_state("networkidle")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, (name, wide)
            assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
        if width > 1000:
            page.click("input.md-search__input")
            page.wait_for_load_state("networkidle")
            page.keyboard.type("soft cap")
            page.wait_for_selector(".md-search-result__item")
        browser.close()
        server.shutdown()
    assert {url for url in asked if not url.startswith(base)} == set()


def test_a_page_to_come_is_left_out_of_the_navigation():
    entries = [
        {"Home": "index.md"},
        {"Guide": [{"One": "one.md"}, {"Two": "two.md"}]},
        {"Empty": [{"Three": "three.md"}]},
    ]
    assert hooks().present(entries, {"index.md", "two.md"}) == [{"Home": "index.md"}, {"Guide": [{"Two": "two.md"}]}]
    assert hooks().repository_path("docs/operations/x.md", "../tuning.md#checks") == "docs/tuning.md"
    for elsewhere in ("https://example.org/a.md", "#part", "missing.md", "../../../etc/passwd"):
        assert hooks().repository_path("docs/operations/x.md", elsewhere) is None
