"""Two saved reports side by side: what is paired, what is refused, what the page and the terminal say."""

import copy
import json
import shutil

import pytest

pytest.importorskip("typer")
pytest.importorskip("jinja2")

from pages import Read
from test_lab_cli import run as run  # the fixture

from ejkernel.lab import page, report, side_by_side

NASTY = '</script><script>window.hacked = 1</script> & "q" <b>'


def sample():
    """A saved report of two operations, one of them at two lengths."""
    chosen = {"forward": {"platform": "xla", "source": "heuristic", "params": {"q_blocksize": 128}}}
    timings = []
    for operation, length, ms in (
        ("flash_attention", 512, 2.0),
        ("flash_attention", 1024, 8.0),
        ("mean_pooling", 512, 1.0),
    ):
        row = {"operation": operation, "what": "forward", "length": length, "call": f"{operation}(query f32[1,{length}])",
               "dtype": "float32", "median_ms": ms, "error": 1e-7, "flags": [], "reason": ""}  # fmt: skip
        timings.append({**row, "implementation": "ejkernel", "ms": ms, "chosen": chosen})
        timings.append({**row, "implementation": "jax.nn", "ms": 3 * ms, "chosen": {}})
    timings.append({**timings[-1], "implementation": "tokamax", "ms": None, "reason": "tokamax is not installed"})
    kernel = {
        "operation": "flash_attention",
        "platform": "xla",
        "backend": "any",
        "runs": True,
        "chosen": True,
        "reasons": ["x"],
    }
    check = {"operation": "flash_attention", "platform": "xla", "check": "plain", "dtype": "float32", "error": 1e-7,
             "bound": 1e-5, "passed": True, "refused": False, "reason": ""}  # fmt: skip
    return {
        "report_version": report.VERSION,
        "machine": {
            "device": "cpu", "devices": 1, "processor": "AMD EPYC", "cores": 2, "fingerprint": "cpu|a", "python": "3.11.7",
            "ejkernel": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "runtime": "r", "measured_at": "2026-11-15T15:00:00Z",
            "versions": {"ejkernel": "0.1.0", "jax": "0.10.2", "triton": "3.6.0"},
        },
        "kernels": [kernel, {**kernel, "platform": "triton", "runs": False, "chosen": False}],
        "checks": [check, {**check, "check": "causal"}],
        "timings": timings,
        "roofline": {},
    }  # fmt: skip


def other():
    """The same of a machine with a GPU and a newer jax: one call is another one, one check is off, one is gone."""
    result = copy.deepcopy(sample())
    result["machine"] |= {"device": "NVIDIA H200", "fingerprint": "gpu|h200", "jax": "0.11.2"}
    result["machine"]["versions"] = {"ejkernel": "0.1.0", "jax": "0.11.2"}
    for row in result["timings"]:
        if row["ms"]:
            row["ms"] /= 4 if row["implementation"] == "ejkernel" else 1
        if row["operation"] == "mean_pooling":
            row["call"] = "mean_pooling(query bf16[8,512])"
    result["timings"][0]["chosen"] = {"forward": {"platform": "triton", "source": "store", "params": {}}}
    result["kernels"][1] |= {"runs": True, "chosen": True}
    result["kernels"][0]["chosen"] = False
    result["checks"] = [{**result["checks"][0], "error": 1e-3, "passed": False}]
    return result


def test_what_is_paired():
    found = side_by_side.beside(sample(), other())
    assert [m["device"] for m in found["machines"]] == ["AMD EPYC", "NVIDIA H200"]
    differs = {row["name"]: (row["a"], row["b"]) for row in found["versions"] if row["differs"]}
    assert differs == {"jax": ("0.10.2", "0.11.2"), "triton": ("3.6.0", None), "device": ("cpu", "NVIDIA H200"),
                       "fingerprint": ("cpu|a", "gpu|h200")}  # fmt: skip
    (kernel,) = found["kernels"]
    assert kernel["a"] == {"chosen": ["xla"], "others": []}
    assert kernel["b"] == {"chosen": ["triton"], "others": ["xla"]}
    assert [(c["check"], c["a"]["error"], c["b"] and c["b"]["error"]) for c in found["checks"]] == [
        ("plain", 1e-7, 1e-3),
        ("causal", 1e-7, None),
    ]
    ratios = [
        (t["operation"], t["length"], t["implementation"], t["ratio"], bool(t["a"]), bool(t["b"]))
        for t in found["timings"]
    ]
    flash = [
        ("flash_attention", n, name, r, True, True)
        for n in (512, 1024)
        for name, r in (("ejkernel", 4.0), ("jax.nn", 1.0))
    ]
    assert ratios[:4] == flash
    # The same operation at the same length is another call there; what neither could time is left out.
    pooling = [("mean_pooling", 512, name, None, a, not a) for a in (True, False) for name in ("ejkernel", "jax.nn")]
    assert ratios[4:] == pooling
    assert found["summary"] == {"calls": 2, "mean": pytest.approx(4.0), "faster": 2, "level": 0, "slower": 0}


def test_a_report_beside_itself_is_level():
    found = side_by_side.beside(sample(), sample())
    assert {row["ratio"] for row in found["timings"]} == {1.0}
    assert not any(row["differs"] for row in found["versions"])
    assert found["summary"]["level"] == found["summary"]["calls"] == 3


def cut(change):
    result = sample()
    change(result)
    return json.dumps(result)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\xfe\x00", "cannot be read (it is no text)"),
        ("{", "is damaged or no JSON (Expecting property name"),
        (json.dumps(sample())[:400], "is damaged or no JSON"),
        ("[1, 2]", "is no report"),
        ('{"machine": {}, "timings": []}', "is no report"),
        (cut(lambda r: r.pop("report_version")), "is a report of version 0, written by ejkernel 0.1.0; this one ("),
        (cut(lambda r: r.update(report_version=99)), "is a report of version 99"),
        (cut(lambda r: r["machine"].pop("versions")), "is damaged: machine has no versions"),
        (cut(lambda r: r.update(checks={})), "is damaged: checks is no list"),
        (cut(lambda r: r["timings"][1].pop("call")), "is damaged: timings[1] has no call"),
        (cut(lambda r: r["timings"].append(3)), "is damaged: timings[7] has no operation"),
        (cut(lambda r: r["timings"][0].update(chosen=[])), "is damaged: timings[0]: chosen is []"),
        (cut(lambda r: r["kernels"][0].update(operation=["x"])), "is damaged: kernels[0]: operation is ['x']"),
    ],
)
def test_what_is_no_report(run, tmp_path, text, words):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(sample()))
    if text is not None:
        bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("report", "--compare", str(good), str(bad), "-o", str(tmp_path / "page"))
    assert (code, out) == (2, "")
    assert err.startswith(f"ejkernel: --compare: '{bad}' ")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "page").exists()


def test_compare_and_quick_is_a_mistake(run, tmp_path):
    code, _, err = run("report", "--quick", "--compare", "a", "b")
    assert code == 2
    assert "--quick is about measuring" in err


def test_the_command(run, tmp_path):
    pytest.importorskip("matplotlib")
    for name, made in (("a", sample()), ("b", other())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(made))
    # A folder stands for the report in it.
    code, out, err = run(
        "report", "--compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json"), "-o", str(tmp_path / "c")
    )
    assert code == 0
    assert f"The page: {(tmp_path / 'c' / 'index.html').as_uri()}" in err
    assert "B is 4.00 × as fast as A, geometric mean of 2 calls: 2 faster." in out
    assert "A: 0 checks not passed, 2 times that the other has not." in out
    assert "B: 1 checks not passed, 2 times that the other has not." in out
    assert json.loads((tmp_path / "c" / "comparison.json").read_text()) == side_by_side.beside(sample(), other())
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"index.html", "comparison.json"}
    read = Read((tmp_path / "c" / "index.html").read_text(encoding="utf-8"))
    assert json.loads(read.scripts[0]) == side_by_side.beside(sample(), other())
    text = (tmp_path / "c" / "index.html").read_text(encoding="utf-8")
    for words in ("A: AMD EPYC", "B: NVIDIA H200", "4.0×", "only in A", "only in B", "✗ too far off", "not there",
                  "triton, store", "xla, heuristic: q_blocksize=128"):  # fmt: skip
        assert words in text
    assert text.count("<figure") == 1
    code, out, _ = run(
        "report", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "c"), "--json"
    )
    assert json.loads(out) == side_by_side.beside(sample(), other())


def hostile():
    """Names that are code elsewhere, and nothing in common."""
    result = other()
    result["machine"] |= {"device": NASTY, "runtime": None}
    result["machine"]["versions"][NASTY] = NASTY
    for part in ("kernels", "checks", "timings"):
        for row in result[part]:
            row["operation"] = NASTY
    result["timings"][0] |= {"ms": "inf", "flags": [NASTY], "error": "nan", "length": None}
    return result


def test_the_page_is_sound_whatever_it_holds(tmp_path):
    pytest.importorskip("matplotlib")
    empty = {**sample(), "kernels": [], "checks": [], "timings": []}
    for first, second in ((sample(), hostile()), (hostile(), hostile()), (empty, empty)):
        path = page.write_comparison(side_by_side.beside(first, second), tmp_path)
        read = Read(path.read_text(encoding="utf-8"))
        assert read.tags.count("script") == len(read.scripts) == 2
        assert len(read.ids) == len(set(read.ids))
        assert all(link.startswith(("#", "data:")) for link in read.links)
        assert {link[1:] for link in read.links if link.startswith("#")} <= set(read.ids)


def test_a_report_that_is_written_can_be_compared(tmp_path):
    """What collect saves has what compare asks of it: the rows of one check and one call."""
    from ejkernel.lab import speed

    rows = speed.bench(speed.Job("mean_pooling", 16, speed.FORWARD, ("ejkernel",)), seconds=0.01)
    made = {**sample(), "machine": report.machine(), "kernels": report.kernels(), "timings": rows}
    (tmp_path / "report.json").write_text(page.as_json(made))
    loaded = side_by_side.load(str(tmp_path))
    assert loaded["timings"][0]["chosen"]["forward"]["platform"] == "xla"
    assert [k["a"]["chosen"] for k in side_by_side.beside(loaded, loaded)["kernels"]] == [["xla"]] * len(
        report.OPERATIONS
    )


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_fits(tmp_path, width, dark):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("matplotlib")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    written = page.write_comparison(side_by_side.beside(sample(), other()), tmp_path)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
        wrong = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(written.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        tab.locator("#timings th button", has_text="A ÷ B").click()
        first = tab.locator("#timings tbody tr").first.inner_text()
        assert "jax.nn" in first
        light = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light != dark
        browser.close()
    assert wrong == []
