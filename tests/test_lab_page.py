"""The report page: its files, what it says, and that it works in a browser."""

import functools
import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pages import Read

from ejkernel.errors import InvalidInputError
from ejkernel.lab import page
from ejkernel.lab.page import figures, series

LENGTHS = (512, 1024, 2048, 4096)


def sample():
    """What a report of a machine with two cores looks like."""
    operations = ("flash_attention", "page_attention", "ring_attention", "blocksparse_attention")
    operations += ("recurrent", "mean_pooling", "grouped_matmul")
    on_gpu = {"flash_attention": ("triton", "cudnn"), "ring_attention": ("triton", "cudnn")}
    kernels, checks, timings, points = [], [], [], []
    for operation in operations:
        row = {"operation": operation, "platform": "xla", "backend": "any", "runs": True}
        kernels.append({**row, "reasons": ["heuristic: q_blocksize=128, kv_blocksize=128"]})
        for platform in on_gpu.get(operation, ()):
            reasons = ["needs a GPU, the device is a CPU"]
            reasons += ["dtype float32 is not supported"] * (platform == "cudnn")
            kernels.append({**row, "platform": platform, "backend": "gpu", "runs": False, "reasons": reasons})
        for number, check in enumerate(("plain", "causal, GQA", "window, soft cap, sinks")):
            row = {"operation": operation, "platform": "xla", "check": check, "bound": 2e-5, "reason": ""}
            checks.append({**row, "error": (1 + len(operation)) * (number + 1) * 1e-8, "passed": True})
    speeds = {"ejkernel": 1.0, "jax.nn": 2.1, "torch SDPA": 1.3, "standard": 2.8}
    for operation, what, work in (
        ("flash_attention", "forward", 1.0),
        ("flash_attention", "forward + backward", 3.2),
        ("blocksparse_attention", "forward", 0.4),
    ):
        for length in LENGTHS:
            for n, (implementation, slower) in enumerate(speeds.items()):
                if operation == "blocksparse_attention" and implementation == "torch SDPA":
                    continue
                ms = work * slower ** (0.2 + length / 4096) * (length / 512) ** (1.75 - 0.02 * n) * 1.9
                if implementation == "torch SDPA" and length == 512:
                    ms *= 0.7
                quadratic = implementation in ("jax.nn", "standard")
                row = {"operation": operation, "what": what, "length": length, "implementation": implementation}
                row |= {
                    "ms": ms,
                    "median_ms": ms * 1.04,
                    "high_ms": ms * 1.11,
                    "tflops": length**2 * 1024 * work / ms / 1e9,
                }
                row |= {"memory_bytes": int(length * 8 * 64 * 4 * 4 + quadratic * length**2 * 32), "error": 3e-7}
                row |= {
                    "flags": ["noisy: the middle half spreads over 14 %"] * (length == 1024 and n == 1),
                    "reason": "",
                }
                timings.append(row)
        timings.append(
            {**dict.fromkeys(timings[-1]), "operation": operation, "what": what, "length": 1024, "flags": []}
            | {"implementation": "tokamax", "reason": "tokamax is not installed: pip install tokamax"}
        )
    for n, length in enumerate(LENGTHS):
        points.append({"name": f"flash_attention {length}", "intensity": length / 6, "tflops": 0.06 + 0.015 * n})
    points.append({"name": "mean_pooling 4096", "intensity": 0.26, "tflops": 0.0034})
    points.append({"name": "page_attention 4096", "intensity": 0.9, "tflops": 0.009})
    return {
        "machine": {
            "device": "cpu", "devices": 1, "fingerprint": "cpu|x86_64|AMD EPYC|329c92ce", "python": "3.11.7",
            "jax": "0.10.2", "jaxlib": "0.10.2", "ejkernel": "0.1.0", "processor": "AMD EPYC 9R14", "cores": 2,
            "measured_at": "2026-11-15T15:00:00Z",
        },
        "kernels": kernels,
        "checks": checks,
        "timings": timings,
        "roofline": {
            "peak": None,
            "ceilings": {"dtype": "float32", "tflops": 0.15, "tb_per_s": 0.018, "read_tb_per_s": 0.02},
            "points": points,
        },
    }  # fmt: skip


def on_gpu():
    """The same of a GPU, where everything runs, a peer is faster and a check is off."""
    result = sample()
    result["machine"] |= {"device": "NVIDIA H200", "devices": 8, "cores": 192}
    result["kernels"] = [{**row, "runs": True, "reasons": ["measured"]} for row in result["kernels"]]
    result["checks"][4] |= {"error": 3e-4, "passed": False}
    result["checks"][5] |= {"error": None, "passed": False, "reason": "dtype float32 is not supported"}
    for row in result["timings"]:
        if row["ms"]:
            row["ms"] *= 0.02 * (0.3 if row["implementation"] == "torch SDPA" else 1)
            row |= {"median_ms": None, "high_ms": None, "tflops": row["tflops"] * 50}
    result["timings"] = [row for row in result["timings"] if row["operation"] == "flash_attention"]
    result["roofline"] = {
        "peak": {"name": "H200", "tflops": 989.4, "tb_per_s": 4.8},
        "ceilings": {"dtype": "bfloat16", "tflops": 742.0, "tb_per_s": 4.1, "read_tb_per_s": 4.3},
        "points": [{"name": f"flash_attention {n}", "intensity": n / 4, "tflops": 90 + n / 9} for n in LENGTHS],
    }
    return result


NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> & \"q\" $x$ _a #0a5fa8 \\ \u2028 é"


def nasty():
    """Text that is code elsewhere, values that are missing, zero, infinite or alone."""
    timing = dict.fromkeys(sample()["timings"][0])
    return {
        "machine": {"device": NASTY, "devices": 1, "measured_at": "yesterday <b>", "fingerprint": NASTY, "cores": None},
        "kernels": [
            {"operation": NASTY, "platform": NASTY, "backend": NASTY, "runs": False, "reasons": [NASTY * 20, None, ""]},
            {"operation": NASTY, "platform": NASTY, "backend": None, "runs": True, "reasons": []},
            {"operation": None, "platform": "x" * 300, "backend": None, "runs": None, "reasons": None},
        ],
        "checks": [
            {"operation": NASTY, "platform": NASTY, "check": NASTY, "error": 0.0, "bound": 0, "passed": True, "reason": ""},
            {**dict.fromkeys(sample()["checks"][0]), "reason": NASTY * 20},
        ],
        "timings": [
            timing,
            {**timing, "operation": NASTY, "what": NASTY, "implementation": NASTY, "length": 64, "ms": 1e-7, "tflops": 0},
            {**timing, "operation": NASTY, "what": NASTY, "implementation": "ejkernel", "length": 64, "ms": 3, "flags": [NASTY]},
            {**timing, "operation": "zero", "implementation": "ejkernel", "length": 64, "ms": 0.0, "memory_bytes": 0},
            {**timing, "operation": "alone", "implementation": "y" * 300, "length": 1, "ms": 2.0, "memory_bytes": 1},
        ],
        "roofline": {
            "peak": {"name": NASTY, "tflops": None, "tb_per_s": 1.0},
            "ceilings": None,
            "points": [{"name": NASTY, "intensity": 1.0, "tflops": 2.0}, {"name": None, "intensity": 0, "tflops": None}],
        },
    }  # fmt: skip


def empty():
    return {"machine": {}, "kernels": [], "checks": [], "timings": [], "roofline": None}


PLOTS = {f"{kind}.{suffix}" for kind in ("latency", "memory", "roofline") for suffix in ("svg", "png")}


def drawn():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots to look at")


def little():
    """A plot of each kind, quick to draw."""
    result = sample()
    return {"machine": result["machine"], "timings": result["timings"][:16], "roofline": result["roofline"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes the page of a result, once."""

    @functools.cache
    def written(make):
        if make not in (empty, dict):
            drawn()
        result = make()
        path = page.write(result, tmp_path_factory.mktemp("page") / "deep" / "report")
        assert result == make()
        return path

    return written


@pytest.mark.parametrize("make", [sample, on_gpu, nasty, empty, dict])
def test_a_page_is_sound_and_holds_its_result(make, written):
    path = written(make)
    assert path.parts[-3:] == ("deep", "report", "index.html")
    assert json.loads((path.parent / "report.json").read_text()) == make()
    read = Read(path.read_text(encoding="utf-8"))
    assert json.loads(read.scripts[0]) == make()
    assert len(read.scripts) == read.tags.count("script") == 2
    assert "img" not in read.tags
    assert len(read.ids) == len(set(read.ids))
    assert all(link.startswith(("#", "data:")) for link in read.links)
    assert {link[1:] for link in read.links if link.startswith("#")} <= set(read.ids)
    assert read.headings[0] == 1
    assert all(later <= earlier + 1 for earlier, later in zip(read.headings, read.headings[1:], strict=False))
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_files(tmp_path):
    drawn()
    page.write(little(), tmp_path)
    assert set(os.listdir(tmp_path)) == {"index.html", "report.json", *PLOTS}
    first = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    assert all(first[name].startswith(b"\x89PNG") for name in PLOTS if name.endswith("png"))
    page.write(little(), tmp_path)
    assert first == {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}  # the same, to the byte
    page.write(empty(), tmp_path)
    assert set(os.listdir(tmp_path)) == {"index.html", "report.json"}  # no plot of the report before


def test_plots_are_drawn_for_what_there_is():
    drawn()
    assert figures.render(empty()) == {}
    result = {**empty(), "timings": [row for row in sample()["timings"] if row["length"] == 512]}
    for row in result["timings"]:
        row["memory_bytes"] = None
    assert figures.render(result).keys() == {"latency.svg", "latency.png"}
    every = figures.render(little())
    assert every.keys() == PLOTS
    text = {name.removesuffix(".svg"): content.decode() for name, content in every.items() if name.endswith(".svg")}
    for name in ("flash_attention", "forward", "jax.nn", "4,096", "time (ms)", "AMD EPYC 9R14"):
        assert f">{name}<" in text["latency"]
    assert ">peak memory (MiB)<" in text["memory"]
    for name in ("mean_pooling 4096", "roof: measured, float32"):
        assert f">{name}<" in text["roofline"]
    assert "tokamax" not in text["latency"]  # it has no time


def test_plots_hold_the_values():
    forward, *_ = series.panels(sample(), "latency")
    assert (forward.operation, forward.what) == ("flash_attention", "forward")
    assert list(forward.series) == ["ejkernel", "jax.nn", "torch SDPA", "standard"]
    assert [row[0] for row in forward.series["ejkernel"]] == list(LENGTHS)
    length, value, high = forward.series["jax.nn"][1]
    row = next(r for r in sample()["timings"] if r["implementation"] == "jax.nn" and r["length"] == 1024)
    assert (length, value, high) == (1024, row["ms"], row["high_ms"])
    assert [panel[:2] for panel in series.panels(nasty(), "latency")] == [(NASTY, NASTY), ("alone", "")]
    assert list(series.roofs(on_gpu())) == ["measured, bfloat16", "datasheet, H200"]
    assert series.roofs(nasty()) == {}


def test_svg_for_a_page():
    drawn()
    pieces = figures.inline(sample())
    assert {kind: len(piece) for kind, piece in pieces.items()} == {"latency": 3, "memory": 3, "roofline": 1}
    for svg in (svg for piece in pieces.values() for svg in piece):
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox")
        assert root.get("width") is None
        assert not [e for e in root.iter() if e.tag.endswith(("style", "metadata"))]
        # Every colour is the theme's, so that it has a dark one.
        assert not re.findall(r"(?:fill|stroke): ?#\w+", svg)
        assert "var(--c0)" in svg


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(theme):
    colours = {role: pair[theme] for role, pair in series.THEME.items()}

    def tint(role, share):
        pairs = [[int(colours[name][n : n + 2], 16) for name in (role, "paper")] for n in (1, 3, 5)]
        return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)

    backgrounds = [colours["paper"], colours["shade"], tint("good", 0.08), tint("bad", 0.08), tint("c0", 0.07)]
    for role in ("ink", "muted", "good", "bad", "c0"):
        assert min(contrast(colours[role], background) for background in backgrounds) >= 4.5, role
    for role in (f"c{n}" for n in range(6)):
        assert contrast(colours[role], colours["paper"]) >= 4.5, role


def row(implementation, ms, **more):
    return {"operation": "op", "what": "forward", "length": 8, "implementation": implementation, "ms": ms, **more}


def test_comparison():
    (found,) = page.compare([row("ejkernel", 2.0), row("ejkernel xla", 1.0), row("slow", 9.0), row("fast", 3.0)])
    assert (found.ours["implementation"], found.peer["implementation"], found.ratio) == ("ejkernel", "fast", 1.5)
    (found,) = page.compare([row("ejkernel xla", 2.0), row("ejkernel triton", 1.0), row("peer", 0.5)])
    assert (found.ours["implementation"], found.ratio, found.verdict) == ("ejkernel triton", 0.5, "slower")
    assert page.compare([row("ejkernel", 1.02), row("peer", 1.0)])[0].verdict == "level"
    assert page.compare([row("ejkernel", 1.0), row("peer", None)]) == []
    assert page.compare([row("ejkernel", 1.0), row(None, 2.0)])[0].against == "?"
    assert page.compare([row("ejkernel", 0.0), row("peer", 1.0)]) == []
    assert page.compare([row("ejkernel", 1.0), row("peer", 2.0, length=16)]) == []


@pytest.mark.parametrize(
    ("ours", "words", "value"),
    [
        (1.0, "Best speed-up over the best peer", "2.0×"),
        (2.0, "Level with the best peer, at best", "1.0×"),
        (8.0, "Slower than the best peer; at best", "0.25×"),
    ],
)
def test_headline_is_honest(ours, words, value, tmp_path):
    drawn()
    text = page.write({"timings": [row("ejkernel", ours), row("peer", 2.0)]}, tmp_path).read_text(encoding="utf-8")
    assert re.search(rf'<dt>{words}</dt><dd class="value \w*">{re.escape(value)}</dd>', text)
    assert f"op, forward, length 8: {ours:g}\u00a0ms where peer takes 2\u00a0ms." in text


def test_headline_says_what_is_flagged(tmp_path):
    drawn()
    rows = [row("ejkernel", 1.0, flags=["noisy: <14 %"]), row("peer", 2.0, flags=None)]
    text = page.write({"timings": rows}, tmp_path).read_text(encoding="utf-8")
    assert "The times were unsteady (noisy: &lt;14 %)." in text


def test_headline_is_of_steady_times(tmp_path):
    drawn()
    rows = [row("ejkernel", 1.0, flags=["unstable"]), row("peer", 900.0)]
    rows += [row("ejkernel", 1.0, length=16), row("peer", 3.0, length=16)]
    text = page.write({"timings": rows}, tmp_path).read_text(encoding="utf-8")
    assert re.search(r'<dt>Best speed-up over the best peer</dt><dd class="value \w*">3\.0×</dd>', text)
    assert "unsteady" not in re.search(r"Best speed-up.*?</d[dl]>.*?</div>", text, re.DOTALL)[0]


def test_headline_counts(written):
    text = written(on_gpu).read_text(encoding="utf-8")
    assert "11<small> of 11</small>" in text
    assert "19<small> of 21</small>" in text
    assert "1 too far off. 1 could not be run." in text
    assert "Over 8 calls: 8 slower" in text
    assert "✗ too far off" in text
    assert "<h1>8 × NVIDIA H200</h1>" in text
    text = written(sample).read_text(encoding="utf-8")
    assert "7<small> of 11</small>" in text
    assert "Over 12 calls: 10 faster, 2 slower (0.76× at worst)." in text
    assert "<h1>AMD EPYC 9R14</h1>" in text
    assert "measured 15 November 2026, 15:00 UTC" in text


def test_what_json_cannot_hold(tmp_path):
    checks = [{"operation": "op", "error": float("nan"), "bound": float("inf"), "passed": False}]
    path = page.write({"checks": checks}, tmp_path)
    kept = json.loads((tmp_path / "report.json").read_text())["checks"][0]
    assert (kept["error"], kept["bound"]) == ("nan", "inf")
    assert '<td class="num" data-value="">nan</td>' in path.read_text(encoding="utf-8")
    with pytest.raises(InvalidInputError, match="result: expected what JSON can hold"):
        page.write({"machine": {"device": object()}}, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "below"):
        with pytest.raises(InvalidInputError, match=r"^folder: '.*' cannot be written \(.*\).*: name another$"):
            page.write(empty(), folder)
    assert file.read_text() == "mine"
    (tmp_path / "taken" / "index.html").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match=r"index\.html in it is a folder"):
        page.write(empty(), tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == ["index.html"]

    page.write(empty(), tmp_path / "full")
    before = (tmp_path / "full" / "index.html").read_bytes()
    write = Path.write_bytes

    def full(path, content):
        if path.name == "index.html":
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InvalidInputError, match="No space left on device"):
        page.write({**empty(), "machine": {"device": "another"}}, tmp_path / "full")
    assert (tmp_path / "full" / "index.html").read_bytes() == before
    assert json.loads((tmp_path / "full" / "report.json").read_text()) == empty()
    assert sorted(os.listdir(tmp_path / "full")) == ["index.html", "report.json"]


def test_plots_without_matplotlib_are_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError,
        match=r"^drawing the report's plots needs matplotlib: pip install '\.\[lab\]' in a clone of ejkernel$",
    ):
        page.write(little(), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_page_without_jinja2_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"^the report's page needs jinja2: pip install .*\[lab\]"):
        page.write(empty(), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_the_style_of_others_is_left_alone():
    drawn()
    import matplotlib

    with matplotlib.rc_context({"font.size": 33, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        result = {"roofline": sample()["roofline"]}
        ours = figures.render(result)
        assert dict(matplotlib.rcParams) == before
    assert ours == figures.render(result)
    assert len(ours) == 2


# --- in a browser ------------------------------------------------------------------------------------------------------

in_a_browser = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    reason = "the page's browser tests need playwright and chromium, and {} is missing"
    api = pytest.importorskip("playwright.sync_api", reason=reason.format("playwright"))
    drawn()
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip(reason.format("chromium"))
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, written):
    """Opens a page of a result, and sees to it that nothing went wrong there nor was asked of the network."""
    contexts, wrong = [], []

    def visit(make, width=1400, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(10_000)
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url))
        tab.goto(written(make).as_uri())
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


@in_a_browser
@pytest.mark.parametrize("make", [pytest.param(sample, marks=pytest.mark.slow), on_gpu, nasty])
@pytest.mark.parametrize("width", [400, pytest.param(1400, marks=pytest.mark.slow)])
def test_plots_are_visible_and_the_page_fits(visit, make, width):
    tab = visit(make, width)
    boxes = tab.evaluate(
        "Array.from(document.querySelectorAll('figure[role=img] > svg'), svg => {"
        " const box = svg.getBoundingClientRect();"
        " return [box.left, box.right, box.width, box.height, svg.querySelectorAll('path').length] })"
    )
    assert len(boxes) == {sample: 7, on_gpu: 5, nasty: 4}[make]
    for left, right, wide, high, paths in boxes:
        assert left >= 0
        assert right <= width
        assert wide > 250
        assert high > 150
        assert paths > 5
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    labels = tab.eval_on_selector_all("figure", "all => all.map(one => one.getAttribute('aria-label'))")
    assert all(len(label) > 20 for label in labels)
    assert tab.evaluate("window.hacked") is None


def column(tab, table, number):
    rows = f"#{table} tbody tr td:nth-child({number})"
    return tab.eval_on_selector_all(rows, "cells => cells.map(c => c.dataset.value ?? c.innerText.trim())")


@in_a_browser
def test_tables_sort(visit):
    tab = visit(sample)
    time = tab.locator("#timings th", has_text="Time (ms)")
    given = column(tab, "timings", 4)
    numbers = sorted(float(value) for value in given if value)
    assert [value for value in given if value] != [repr(value) for value in numbers]
    time.locator("button").click()
    assert time.get_attribute("aria-sort") == "ascending"
    up = column(tab, "timings", 4)
    assert [float(value) for value in up[: len(numbers)]] == numbers
    assert up[len(numbers) :] == [""] * 3  # what has no time comes last
    time.locator("button").click()
    assert time.get_attribute("aria-sort") == "descending"
    down = column(tab, "timings", 4)
    assert [float(value) for value in down[: len(numbers)]] == numbers[::-1]
    assert down[len(numbers) :] == [""] * 3

    length, name = (tab.locator("#timings th", has_text=text) for text in ("Length", "Implementation"))
    length.locator("button").focus()
    tab.keyboard.press("Enter")
    assert length.get_attribute("aria-sort") == "ascending"
    assert time.get_attribute("aria-sort") is None
    name.locator("button").focus()
    tab.keyboard.press("Space")
    assert name.get_attribute("aria-sort") == "ascending"
    names = column(tab, "timings", 3)
    assert names == sorted(names)
    lengths = [float(v) for v, n in zip(column(tab, "timings", 2), names, strict=True) if n == "ejkernel"]
    assert lengths == sorted(lengths)  # a sort keeps the order of equals
    assert len(lengths) == 12

    tab.locator("#checks th", has_text="Largest error").locator("button").click()
    errors = [float(value) for value in column(tab, "checks", 4)]
    assert errors == sorted(errors)
    assert errors[0] < errors[-1]


@in_a_browser
def test_times_filter(visit):
    tab = visit(sample)
    tab.fill("#filter", "JAX.nn backward")
    shown = tab.locator("#timings tbody tr:visible")
    assert shown.count() == 4
    assert all("jax.nn" in text for text in shown.all_inner_texts())
    assert tab.locator(".tools:has(#filter) output").inner_text() == "4 of 47"
    tab.fill("#filter", "")
    assert shown.count() == 47


@in_a_browser
def test_reasons_open_with_a_tap(visit):
    tab = visit(sample, 400, has_touch=True)
    reason = tab.get_by_text("needs a GPU, the device is a CPU").first
    assert not reason.is_visible()
    mark = tab.locator(".matrix summary", has_text="no").first
    mark.tap()
    assert reason.is_visible()
    mark.tap()
    assert not reason.is_visible()
    tab.tap("#reasons")
    assert reason.is_visible()
    assert tab.get_by_text("dtype float32 is not supported").last.is_visible()
    assert visit(sample).get_by_text("needs a GPU, the device is a CPU").first.is_visible()  # there is room


@in_a_browser
def test_light_and_dark(visit):
    colour = "([selector, what]) => getComputedStyle(document.querySelector(selector))[what]"

    def shown(tab):
        ink = tab.evaluate(colour, ["body", "color"])
        drawn = tab.evaluate(colour, ["figure svg text", "fill"])
        return tab.evaluate(colour, ["body", "backgroundColor"]), ink, drawn

    def rgb(theme, *roles):
        hexes = [series.THEME[role][theme] for role in roles]
        return tuple("rgb({}, {}, {})".format(*(int(h[n : n + 2], 16) for n in (1, 3, 5))) for h in hexes)

    expected = [rgb(theme, "paper", "ink", "muted") for theme in (0, 1)]
    light, dark = visit(sample, color_scheme="light"), visit(sample, color_scheme="dark")
    assert shown(light) == expected[0]
    assert shown(dark) == expected[1]
    light.click("#theme")
    assert shown(light) == expected[1]
    assert light.inner_text("#theme") == "Light"
    light.click("#theme")
    dark.click("#theme")
    assert shown(light) == shown(dark) == expected[0]
    dark.click("#theme")
    dark.emulate_media(media="print", color_scheme="dark")
    assert shown(dark) == expected[0]  # on paper it is light


@in_a_browser
def test_json_downloads(visit):
    tab = visit(nasty)
    with tab.expect_download() as download:
        tab.click("#download")
    assert download.value.suggested_filename == "report.json"
    assert json.loads(Path(download.value.path()).read_text(encoding="utf-8")) == nasty()
