"""The command line."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from ejkernel.lab import accuracy, cli, files, report, speed


@pytest.fixture
def run(monkeypatch, capsys):
    """``run("info", "--json") -> (exit code, stdout, stderr)``"""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ejkernel", *arguments])
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


def test_info(run):
    code, out, _ = run("info", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["machine"]["fingerprint"]
    assert {row["operation"] for row in result["kernels"]} >= {"flash_attention", "recurrent"}
    code, out, _ = run("info")
    assert code == 0
    assert "needs a GPU, the device is a CPU" in out
    assert result["machine"]["fingerprint"] in out


def test_info_for_another_device(run):
    code, out, _ = run("info", "--device", "nvidia-h200", "--json")
    rows = json.loads(out)["kernels"]
    assert code == 0
    assert not any("the device is a CPU" in reason for row in rows for reason in row["reasons"])


def test_explain(run):
    shape = ("--shape", "2,4096,32,128", "--shape", "key=2,4096,8,128", "--causal", "--device", "nvidia-h200")
    code, out, _ = run("explain", "flash_attention", *shape)
    assert code == 0
    assert out.startswith(
        "flash_attention(query bf16[2,4096,32,128], key bf16[2,4096,8,128], value bf16[2,4096,8,128], causal) on nvidia-h200"
    )
    code, out, _ = run("explain", "flash_attention", *shape, "--json")
    result = json.loads(out)
    assert result["device"] == "nvidia-h200"
    assert result["chosen"] == next(c["platform"] for c in result["candidates"] if c["verdict"] == "chosen")
    code, out, _ = run(
        "explain",
        "flash_attention",
        "--set",
        "sliding_window=[255,0]",
        "--set",
        "bias=float32[1,8,150,150]",
        "--dtype",
        "f32",
    )
    assert (code, "sliding_window=(255, 0)" in out, "bias f32[1,8,150,150]" in out) == (0, True, True), out
    for operation in report.OPERATIONS:
        assert run("explain", operation, "--dtype", "float32")[0] == 0


def test_explain_what_nothing_can_run(run):
    code, out, _ = run("explain", "flash_attention", "--platform", "cudnn")
    assert code == 1
    assert "needs a GPU" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "flush"), "operation is 'flush'; expected one of flash_attention, "),
        (("explain", "flash_attention", "--shape", "2,x"), "--shape query is '2,x'; expected sizes such as 2,1024,8,64."),
        (("explain", "flash_attention", "--shape", "2,3"), "--shape query is (2, 3); expected 4 sizes"),
        (("explain", "flash_attention", "--shape", "keys=2,3"), "--shape names 'keys'; expected one of query, key, value."),
        (("explain", "flash_attention", "--dtype", "float33"), "--dtype is 'float33'; expected a dtype such as bfloat16"),
        (("explain", "flash_attention", "--set", "causal"), "--set is 'causal'; expected NAME=VALUE."),
        (("explain", "flash_attention", "--set", "cuasal=1"), "--set names 'cuasal'; expected an argument of flash_attention"),
        (("explain", "flash_attention", "--set", "sliding_window=-3"), "sliding_window"),
        (("explain", "flash_attention", "--device", "nvidia-h900"), "nvidia-h900"),
        (("explain", "mean_pooling", "--causal"), "--causal: mean_pooling has no such argument."),
        (("explain", "flash_attention", "--platform", "trition"), "platform is 'trition'; expected one of "),
        (("check", "flush"), "operation is 'flush'; expected one of flash_attention, "),
        (("check", "--platform", "cudnn"), "platform is 'cudnn': none of its kernels runs on this machine"),
        (("bench", "--length", "0"), "--length is 0; expected at least 1."),
        (("bench", "--length", "many"), "Invalid value for '--length'"),
        (("bench", "--seconds", "0"), "seconds"),
        (("tune", "flush"), "operation is 'flush'"),
        (("roofline", "-o", "/proc/none/roofline.png"), "--output is '/proc/none/roofline.png': no file can be written there "),
        (("report", "-o", "/dev/null"), "--output is '/dev/null"),
        (("reprot",), "No such command 'reprot'"),
        (("info", "--jsno"), "No such option"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_exit_code_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("ejkernel: ")
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_an_unforeseen_error_is_one_line_unless_debugging(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("the disk is on fire\nsecond line")

    monkeypatch.setattr(report, "machine", broken)
    code, out, err = run("info")
    assert (code, out, err) == (1, "", "ejkernel: RuntimeError: the disk is on fire (--debug shows where)\n")
    monkeypatch.setattr(sys, "argv", ["ejkernel", "info", "--debug"])
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        cli.main()


def test_check(run, monkeypatch):
    code, out, _ = run("check", "mean_pooling", "--json")
    assert code == 0
    assert [(r["platform"], r["check"], r["passed"]) for r in json.loads(out)["checks"]] == [
        ("xla", "masked", True),
        ("xla", "packed", True),
    ]
    monkeypatch.setitem(accuracy.BOUNDS, "float32", 1e-12)
    code, out, _ = run("check", "mean_pooling")
    assert code == 1
    assert "too far: " in out


def test_json_is_json_when_a_kernel_is_wrong_altogether(run, monkeypatch):
    monkeypatch.setattr(accuracy, "relative_errors", lambda *_: {"out": float("inf")})
    code, out, _ = run("check", "mean_pooling", "--json")
    rows = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["checks"]
    assert code == 1
    assert {row["error"] for row in rows} == {"inf"}


def test_no_command_is_the_help(run):
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "report" in out


@pytest.mark.parametrize("arguments", ["info", pytest.param("info --json", marks=pytest.mark.slow)])
def test_a_reader_that_leaves_is_no_failure(arguments):
    command = f"set -o pipefail; {sys.executable} -c 'from ejkernel.lab.cli import main; main()' {arguments} | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_bench(run):
    code, out, _ = run("bench", "mean_pooling", "--length", "64", "--seconds", "0.02", "--json")
    assert code == 0
    rows = json.loads(out)["timings"]
    assert {(r["implementation"], r["what"]) for r in rows} == {
        (name, what) for name in ("ejkernel", "jnp.mean") for what in (speed.FORWARD, speed.BOTH)
    }
    assert all(0 < r["ms"] <= r["median_ms"] <= r["high_ms"] for r in rows)
    code, out, _ = run(
        "bench", "mean_pooling", "--length", "64", "--seconds", "0.02", "--no-peers", "--forward", "--pinned"
    )
    assert code == 0
    assert "ejkernel xla" in out
    assert "jnp.mean" not in out


def test_bench_says_when_ours_fails(run, monkeypatch):
    monkeypatch.setattr(speed.Workload, "function", lambda self, platform=None: lambda arrays: 1 / 0)
    code, out, _ = run("bench", "mean_pooling", "--length", "64", "--no-peers", "--forward")
    assert code == 1
    assert "ZeroDivisionError" in out


def test_tune_measures_and_keeps(run, own_store):
    code, out, _ = run("tune", "mean_pooling", "--length", "64", "--json")
    assert code == 0
    rows = json.loads(out)["tuned"]
    assert {(r["direction"], r["platform"]) for r in rows} == {("forward", "xla"), ("backward", "xla")}
    assert all(r["ms"] > 0 for r in rows)
    assert len(list((own_store / "tuned").glob("mean_pooling-*.json"))) == 2


def _ceilings(**_):
    from ejkernel.lab.ceilings import Ceilings

    return Ceilings("cpu", "f", 2e10, 3e10, {"float32": 1e11})


def _quick_bench(job, *, seconds=0):
    row = {"operation": job.operation, "what": job.what, "length": job.length, "dtype": "float32", "ms": 1.5, "median_ms": 1.6,
           "name": job.name(), "call": job.name(), "params": None, "chosen": {}, "high_ms": 1.7, "compile_ms": 9.0, "tflops": 0.001, "memory_bytes": 1 << 20, "error": 1e-7, "flags": [],
           "reason": ""}  # fmt: skip
    return [{**row, "implementation": name} for name in job.implementations]


def test_roofline(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr("ejkernel.lab.ceilings.measure_ceilings", _ceilings)
    monkeypatch.setattr(speed, "bench", _quick_bench)
    picture = tmp_path / "new" / "roofline.svg"
    code, out, _ = run("roofline", "-o", str(picture))
    assert code == 0
    assert "0.1 TFLOP/s float32" in out
    assert picture.read_text().count("flash_attention") >= 1 or picture.stat().st_size > 5000


def test_an_interrupted_picture_leaves_what_was_there(run, monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr("ejkernel.lab.ceilings.measure_ceilings", _ceilings)
    monkeypatch.setattr(speed, "bench", _quick_bench)

    def savefig(self, place, **options):
        file = place if hasattr(place, "write") else open(place, "wb")
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    (tmp_path / "old.svg").write_text("old")
    assert run("roofline", "-o", str(tmp_path / "old.svg"))[::2] == (130, "ejkernel: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["old.svg"]
    assert (tmp_path / "old.svg").read_text() == "old"


@pytest.mark.parametrize(("output", "words"), [("roofline.xyz", "expected a picture's name, ending in .png, .svg, .pdf."),
                                               ("file/roofline.png", "no file can be written there")])  # fmt: skip
def test_a_picture_that_cannot_be_is_known_before_any_work(run, monkeypatch, tmp_path, output, words):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ejkernel.lab.ceilings.measure_ceilings", lambda **_: 1 / 0)
    code, out, err = run("roofline", "-o", str(tmp_path / output))
    assert (code, out) == (2, "")
    assert words in err


def test_report(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    passed = {"operation": "x", "platform": "xla", "check": "c", "dtype": "float32", "error": 1e-7, "bound": 1e-5,
              "passed": True, "refused": False, "reason": ""}  # fmt: skip
    monkeypatch.setattr(report, "measure_ceilings", _ceilings)
    monkeypatch.setattr(report, "plan", lambda quick: speed.bench_plan(["mean_pooling"], (64, 128), backward=not quick))
    monkeypatch.setattr(report, "bench", _quick_bench)
    monkeypatch.setattr(accuracy, "check", lambda *job: passed)
    code, out, err = run("report", "--quick", "-o", str(tmp_path / "page"))
    assert code == 0
    assert "Against float64" in out
    assert (tmp_path / "page" / "index.html").as_uri() in err
    assert {"index.html", "report.json", "latency.png", "memory.svg", "roofline.png"} <= set(
        os.listdir(tmp_path / "page")
    )
    monkeypatch.setattr(accuracy, "check", lambda *job: {**passed, "passed": False, "reason": "too far: out"})
    code, out, err = run("report", "--quick", "-o", str(tmp_path / "page"), "--json")
    assert code == 1
    result = json.loads(out)
    assert json.loads((tmp_path / "page" / "report.json").read_text()) == result
    assert "The page: " in err


def test_help_has_examples(run):
    assert run("--help")[0] == 0
    for command in ("info", "explain", "check", "bench", "tune", "roofline", "report"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"ejkernel {command}" in out.partition("Examples")[2], out


def test_interrupted(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "machine", interrupt)
    assert run("info") == (130, "", "ejkernel: interrupted\n")


SLOW = {
    "bench": """
import sys, time
from ejkernel.lab import cli, speed
speed.bench = lambda job, **options: (print("timing", flush=True), time.sleep(60))
sys.argv = ["ejkernel", "bench", "flash_attention"]
cli.main()
""",
    # In the thread that measures, while another compiles.
    "tune": """
import os, sys
from ejkernel.lab import cli
from ejkernel.ops.config import autotune
build = autotune._work
# At once: several threads may say it, and lines of print would mix.
autotune._work = lambda *a, **k: (os.write(1, b"timing\\n"), build(*a, **k))[1]
sys.argv = ["ejkernel", "tune", "flash_attention", "--length", "512"]
cli.main()
""",
}


@pytest.mark.parametrize("command", ["bench", pytest.param("tune", marks=pytest.mark.slow)])
def test_a_signal_ends_it_cleanly(command):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW[command]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background of a shell ignores interrupts, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "timing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1] == "ejkernel: interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_one_line(missing):
    script = f"import sys; sys.modules[{missing!r}] = None\nfrom ejkernel.lab.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert (
        result.stderr.strip()
        == f"ejkernel: the command line needs {missing}: pip install '.[lab]' in a clone of ejkernel"
    )


def test_can_write(tmp_path):
    files.can_write(tmp_path / "a" / "b" / "index.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no file can be written there"):
        files.can_write(tmp_path / "file" / "index.html")
    with pytest.raises(ValueError, match="no file can be written there"):
        files.can_write(tmp_path)
