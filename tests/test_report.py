"""The command line's report."""

import json
import subprocess
import sys

import numpy as np
import oracle
import pytest

from ejkernel import kernel_registry
from ejkernel.lab import reference, report


def test_the_reference_agrees_with_the_oracle():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 8)) for n, h in ((9, 4), (13, 2), (13, 2)))
    options = {"causal": True, "sliding_window": (5, 1), "logits_soft_cap": 2.0, "softmax_aux": np.array([0.3, -1.0])}
    np.testing.assert_allclose(
        reference.attention(q, k, v, **options), oracle.attention(q, k, v, **options)[0], rtol=1e-9, atol=1e-12
    )


def test_checks_pass_and_can_fail(monkeypatch):
    assert all(row["passed"] for row in report.checks("xla"))
    refused = list(report.checks("cuda"))
    assert not any(row["passed"] for row in refused)
    assert all("no implementation is registered for platform='cuda'" in row["reason"] for row in refused)
    monkeypatch.setattr(report, "BOUND", 1e-12)
    assert not any(row["passed"] for row in report.checks("xla"))


def test_kernels_are_listed_with_reasons():
    rows = report.kernels()
    assert {"operation": "flash_attention", "platform": "xla", "backend": "any", "runs": True} == {
        k: rows[0][k] for k in ("operation", "platform", "backend", "runs")
    }
    operations = {name for name in kernel_registry.list_algorithms() if kernel_registry.operation(name)}
    assert {row["operation"] for row in rows} == operations


def test_command(monkeypatch, capsys):
    pytest.importorskip("typer")
    from ejkernel.lab import cli

    monkeypatch.setattr(report, "best_time", lambda run, *args, rounds=1: 0.001)
    monkeypatch.setattr(sys, "argv", ["ejkernel", "report", "--quick", "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code in (0, None)
    result = json.loads(capsys.readouterr().out)
    assert {"machine", "kernels", "checks", "timings"} == set(result)
    assert len(result["timings"]) == 6
    monkeypatch.setattr(sys, "argv", ["ejkernel", "report", "--quick"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Against float64" in capsys.readouterr().out


def test_a_missing_package_is_one_line():
    script = "import sys; sys.modules['typer'] = None\nfrom ejkernel.lab.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip() == "ejkernel: the command line needs typer: pip install 'ejkernel[lab]'"
