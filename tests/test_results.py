"""Committed results: each fits the one schema, loses nothing in it, and docs/benchmarks.md shows what is there."""

import importlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_fits_the_schema(load, path):
    found = load("schema").read(path)
    assert found.rows or found.logs
    assert (ROOT / found.script).is_file() if found.script else found.logs
    if path.parent.name != "lab_h200":  # written before the examples kept versions
        assert "jax" in found.versions


def leaves(value):
    """The numbers in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in leaves(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def figures(value, schema):
    """The numbers of a file's parts that are not names of calls; logs say themselves what theirs are."""
    if isinstance(value, dict):
        skipped = {*schema.CALL, *schema.REMARKS}
        parts = [v for k, v in value.items() if k not in skipped and not (isinstance(v, dict) and "how" in v)]
        return [number for part in parts for number in figures(part, schema)]
    if isinstance(value, list):
        return [number for item in value for number in figures(item, schema)]
    return leaves(value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_number_is_lost_or_made_up(load, path):
    schema, content = load("schema"), json.loads(path.read_text())
    parts = {key: value for key, value in content.items() if key not in (*schema.HEAD, *schema.ABOUT, *schema.PLAIN)}
    rows = schema.read(path).rows
    read = Counter(x for row in rows for x in (row.best, row.median) if x is not None)
    assert read == Counter(figures(parts, schema))


def test_every_number_of_the_page_is_one_of_its_file():
    """Independently of what writes the page: a number in a cell, at its digits, is a number of that section's file."""
    sections = re.split(r"^### (\w+)$", PAGE.read_text(), flags=re.MULTILINE)
    by_stem = {path.stem: leaves(json.loads(path.read_text())) for path in FILES}
    assert set(sections[1::2]) == set(by_stem)
    checked = 0
    for stem, text in zip(sections[1::2], sections[2::2], strict=True):
        for table in re.findall(r"^(\|.*\|)\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE):
            named = table[0].count("| part |") + 1
            for line in table[1].splitlines():
                for cell in line.strip("| ").split(" | ")[named:]:
                    for shown in re.findall(r"[\d,]*\d(?:\.\d*)?(?:e[+-]\d+)?", cell):
                        number = float(shown.replace(",", ""))
                        digits = 5e-3 if "e" in shown else 6e-4
                        assert any(abs(x - number) <= digits * abs(number) for x in by_stem[stem]), (stem, shown, line)
                        checked += 1
    assert checked > 1500


def test_the_page_has_every_file_and_every_plot_and_no_number_of_its_own(load):
    text = PAGE.read_text()
    for path in RESULTS.rglob("*.*"):
        assert f"](../{path.relative_to(ROOT).as_posix()})" in text, path
    assert not re.search(r"\d", load("results_page").HEAD)


def held(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(table, text):
    """The cells of the README's table with that first line, below its head."""
    lines = text.partition(f"{table}\n")[2].splitlines()[1:]
    return [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]


def test_the_readme_s_tables_hold_what_was_measured():
    """The three that are compared with peers, and the training; a cell is rounded from the file that stands above."""
    text = (ROOT / "README.md").read_text()
    peers = {row["case"]: row for row in held("attention_cpu")["peers"]}
    shown = rows_of("| | ejkernel | torch 2.13 SDPA | jax.nn (xla) |", text)
    assert len(shown) == 4
    for call, *cells in shown:
        kind, length = call.rsplit(", ", 1)
        row = peers[f"{length} {kind.replace(' ', '')}"]
        own, torch, jax_nn = (row[f"{name}_ms"] for name in ("ejkernel", "torch", "jax.nn"))
        assert cells == [
            f"{own:.0f} ms",
            f"{torch:.0f} ms ({torch / own:.2f} ×)",
            f"{jax_nn:.0f} ms ({jax_nn / own:.1f} ×)",
        ]

    names = ("ejkernel pallas", "jax.nn cudnn", "tokamax mosaic_gpu", "FlashAttention-4")
    cells = {(c["implementation"], c["head_dim"], c["length"], c["causal"]): c for c in held("pallas_h200")["cells"]}
    shown = rows_of(
        "| head dim, length, mask | ejkernel | jax.nn (cuDNN) | tokamax (Mosaic) | FlashAttention-4 (torch) |", text
    )
    assert len(shown) >= 6
    for call, *figures in shown:
        dim, length, mask = call.split(", ")
        found = [cells[name, int(dim), int(length[:-1]) * 1024, mask == "causal"] for name in names]
        assert figures == [f"{c['forward_tflops']:.0f} / {c['backward_tflops']:.0f}" for c in found], call

    served = {
        (r["call"], r["implementation"]): r.get("terabytes_per_second") for r in held("page_attention_h200")["rows"]
    }
    calls = {
        "64 sequences of 4k": "64 × 4k, pages of 64",
        "1 sequence of 64k": "1 × 64k, pages of 64",
        "128 sequences of 100 to 16k": "128 × 100–16k, pages of 64",
        "32 sequences of 8k, dense cache": "dense 32 × 1 × 8k",
    }
    for call, *figures in rows_of("| TB/s | ejkernel | FlashAttention-4 (torch) | jax Pallas |", text):
        peer = "FlashAttention-4" + " dense" * ("dense" in call)
        found = [served.get((calls[call], name)) for name in ("ejkernel", peer, "jax Pallas")]
        assert figures == ["–" if x is None else f"{x:.2f}" for x in found], call

    runs = {name: held(f"train_{name}")["runs"] for name in ("cpu/train_decoder", "h200/train_decoder_350m")}
    seconds = [run["cpu_seconds"] for run in runs["cpu/train_decoder"].values()]
    assert "took {:.0f} s of CPU time, with jax.nn {:.0f} s".format(*seconds) in text
    for run in runs["h200/train_decoder_350m"].values():
        assert f"{run['tokens_per_second']:,.0f}" in text


def result(**changed):
    """The smallest file."""
    return {"script": "s.py", "date": "2026-01-02", "device": "D", "versions": {"jax": "1"}, "rows": [{"call": "c", "ms": 1.5}], **changed}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"date": ""}, "date"),
        ({"device": ""}, "device"),
        ({"rows": []}, "no parts"),
        ({"rows": [{"call": "c", "speed": 3.0}]}, "speed"),
        ({"rows": [{"call": "c", "ms": 1.0}, {"call": "c", "ms": 2.0}]}, "two figures"),
        ({"rows": [{"call": "c", "ms": float("nan")}]}, "nan"),
        ({"extra": {"a": 1.0}}, "names no unit"),
    ],
)
def test_what_does_not_fit_is_named(load, tmp_path, changed, said):
    schema, path = load("schema"), tmp_path / "file.json"
    path.write_text(json.dumps(result(**changed)))
    with pytest.raises(schema.SchemaError, match=rf"file\.json: .*{said}"):
        schema.read(path)


def test_columns_are_read_by_their_names(load, tmp_path):
    schema, path = load("schema"), tmp_path / "file.json"
    rows = [
        {"call": "c", "implementation": "i", "direction": "forward", "ms": 1.0, "median_ms": 2.0, "error_out": 0.1},
        {"case": "c", "ejkernel_ms": 3.0, "peer_ms": 4.0, "faster_than_peer": 5.0, "temporary_mib": 6.0},
        {"call": "c", "implementation": "i", "failed": "no memory"},
    ]
    path.write_text(json.dumps(result(rows=rows, memory_mib={"forward": 7.0}, log={"how": "by hand", "rows": [8.0]})))
    found = schema.read(path)
    named = [(r.implementation, r.quantity, r.unit, r.best, r.median) for r in found.rows]
    assert named == [
        ("i", "forward", "ms", 1.0, 2.0),
        ("i", "error of out", "relative error", 0.1, None),
        ("ejkernel", "time", "ms", 3.0, None),
        ("peer", "time", "ms", 4.0, None),
        ("ejkernel", "faster than peer", "×", 5.0, None),
        ("ejkernel", "temporary memory", "MiB", 6.0, None),
        ("i", "time", "ms", None, None),
        ("", "memory", "MiB", 7.0, None),
    ]
    assert found.rows[6].note == "no memory"
    assert found.logs == {"log": "by hand"}


def test_what_a_script_keeps_can_be_read(load, tmp_path, monkeypatch, capsys):
    shared, schema, path = load("shared"), load("schema"), tmp_path / "file.json"
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "float32_gpu.py")])
    rows = [{"call": "c", "direction": "forward", "platform": "xla", "tiles": "default", "ms": 1.25}]
    shared.keep(path, iter(rows), "triton", "no-such-package")
    found = schema.read(path)
    assert (found.script, found.rows[0].best) == ("benchmarks/float32_gpu.py", 1.25)
    assert {"python", "jax", "jaxlib"} <= set(found.versions)
    assert "no-such-package" not in found.versions
    assert "1.25" in capsys.readouterr().out


def test_a_wrong_result_is_never_the_best(load):
    schema, page = load("schema"), load("results_page")
    times = {"ejkernel": 2.0, "peer": 1.0}
    rows = [schema.Row("p", "c", name, q, "ms", t) for q in ("forward", "both") for name, t in times.items()]
    rows += [schema.Row("p", "c", "peer", "error of dkey", schema.RELATIVE, 0.4)]
    found = schema.Results("f.json", "", "D", {}, "2026-01-02", {}, tuple(rows), {})
    cells = {caption: lines[0][1:] for caption, _, lines in page.tables(found)}
    assert cells["forward, ms"] == ["2.000", "**1.000**"]
    assert cells["both, ms"] == ["2.000", "1.000, wrong result"]
