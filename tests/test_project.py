"""What is around the code says what is true: hooks, the workflow, templates, CONTRIBUTING."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[lab]'")

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FILES = [ROOT / ".pre-commit-config.yaml", *sorted(GITHUB.rglob("*.yml"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(GITHUB.rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def strings(value):
    """All texts in what a YAML file holds."""
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [value] if isinstance(value, str) else [s for v in value for s in strings(v)] if isinstance(value, list) else []
    )


def commands(path):
    """What a file tells to type: code in a page, in backticks or in a step's `run`."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        return [*fenced, *re.findall(r"^    (\S.*)$", prose, re.MULTILINE), *re.findall(r"`([^`]+)`", prose)]
    found = yaml.safe_load(text)
    steps = [step["run"] for job in found.get("jobs", {}).values() for step in job["steps"] if "run" in step]
    return [*steps, *(code for s in strings(found) for code in re.findall(r"`([^`]+)`", s))]


def workflow():
    return yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())


def test_yaml_files_hold_something():
    assert len(FILES) >= 5
    for path in FILES:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_that_are_named_exist(path):
    """Targets of make, commands of ejkernel, scripts."""
    typer = pytest.importorskip("typer")
    from ejkernel.lab import cli

    known = set(typer.main.get_command(cli._app()).commands)
    lines = [line.strip() for command in commands(path) for line in command.splitlines()]
    named = {m for line in lines for m in re.findall(r"^make ([a-z][a-z-]*)", line)}
    assert named <= TARGETS
    asked = {m for line in lines for m in re.findall(r"^(?:\S*/)?ejkernel ([a-z]+)\b(?!\.)", line)}
    assert asked <= known
    scripts = {m for line in lines for m in re.findall(r"^python (\S+\.py)", line)}
    assert all((ROOT / script).exists() for script in scripts), scripts


def test_targets_are_found():
    """Or the test above would be empty."""
    assert {"test", "lint", "types", "docs", "wheel"} <= TARGETS
    assert any("make test" in command for command in commands(ROOT / "CONTRIBUTING.md"))
    assert any("ejkernel bench" in command for command in commands(GITHUB / "ISSUE_TEMPLATE" / "slow.yml"))


def test_hooks_fetch_nothing():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    brought = {"ruff": "ruff", "lint-imports": "import-linter"}
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        program, *rest = shlex.split(hook["entry"])
        assert (
            brought[program] in extras
            if program in brought
            else (program, (ROOT / rest[0]).exists()) == ("python", True)
        )


def test_templates_ask_for_what_is_needed():
    wrong, slow = ((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text() for name in ("wrong-result", "slow"))
    assert "`ejkernel info`" in wrong
    assert "ejkernel.explain(" in wrong
    assert "`ejkernel bench`" in slow
    assert "`ejkernel report`" in slow


def calls_of_make(lines):
    """``(target, {name: value})`` of each; the programs that a lane runs on are its own affair."""
    found = []
    for line in lines:
        words = shlex.split(line)
        if words[:1] == ["make"]:
            given = dict(word.split("=", 1) for word in words[2:])
            found.append((words[1], {n: v for n, v in given.items() if n not in ("PYTHON", "VENV")}))
    return found


def test_the_workflow_does_what_ci_does():
    script = (ROOT / ".ci" / "run").read_text()
    arrays = dict(re.findall(r"^\s*(floor|newest)=\((.*)\)$", script, re.MULTILINE))
    lines = re.findall(r"^\s*timed (make .*)$", script, re.MULTILINE)
    assert len(lines) >= 5
    for name, given in arrays.items():
        lines = [line.replace(f'"${{{name}[@]}}"', given) for line in lines]
    done = []
    for job in workflow()["jobs"].values():
        for step in job["steps"]:
            run = step.get("run", "")
            for name, value in job.get("env", {}).items():
                run = run.replace(f"${name}", value)
            done += calls_of_make(run.splitlines())
    wanted = calls_of_make(lines)
    for call in wanted:
        assert call in done, call
    # Nor does a push find what this does not.
    more = [call for call in done if call[1] and call not in wanted]
    assert not more, more


def test_the_workflow_runs_every_python_that_is_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = {c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    run = {step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")}
    assert run == promised


def test_accelerators_lanes_wait_for_runners():
    jobs = workflow()["jobs"]
    for name in ("gpu", "tpu"):
        assert f"vars.{name.upper()}_RUNNERS == 'true'" in jobs[name]["if"]
        assert jobs[name]["runs-on"] == ["self-hosted", name]


def test_the_changelog_is_sorted_by_kind():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased" or re.match(r"\d+\.\d+\.\d+ – ", versions[0])
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert "- Fixed: " not in text
