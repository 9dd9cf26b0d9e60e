"""What benchmarks/models_gpu.py measured, as a table in Markdown: `docs/generate.py` puts it into docs/models.md."""

import functools
import statistics
import textwrap

OURS = "ejkernel"
# A relative error that is none of bfloat16's: such a result is another call's.
WRONG = 0.05
DIRECTIONS = {"forward": "forward", "both": "forward + backward"}


def by_family(result):
    """The rows, all lengths of a model together."""
    families = list(dict.fromkeys(row["name"].split("-")[0] for row in result["calls"]))
    return sorted(result["calls"], key=lambda row: families.index(row["name"].split("-")[0]))


def wrong(one, direction):
    """Whether an implementation's output, or for both directions any gradient, was found to be wrong."""
    errors = one.get("error", {})
    return not all(errors[name] < WRONG for name in (errors if direction == "both" else errors.keys() & {"out"}))


def best_peer(row, direction):
    """The fastest other implementation of a call whose result is right and its milliseconds, or None."""
    times = {
        name: one[f"{direction}_ms"]
        for name, one in row["implementations"].items()
        if name != OURS and f"{direction}_ms" in one and not wrong(one, direction)
    }
    return min(times.items(), key=lambda pair: pair[1]) if times else None


def speed(row, direction):
    """Ours over the best peer's, or None where either is missing."""
    ours, peer = row["implementations"][OURS].get(f"{direction}_ms"), best_peer(row, direction)
    return peer[1] / ours if ours and peer else None


def _cells(row, direction):
    """Ours, the best peer's and the ratio."""
    ours, peer, ratio = (
        row["implementations"][OURS].get(f"{direction}_ms"),
        best_peer(row, direction),
        speed(row, direction),
    )
    return [
        f"{ours:.3f}" if ours else "fails",
        f"{peer[1]:.3f} {peer[0]}" if peer else "none can",
        f"{ratio:.2f}" if ratio else "—",
    ]  # fmt: skip


def markdown(result):
    """Where it was measured, a summary, and a line a call."""
    wrap = functools.partial(textwrap.fill, width=118, subsequent_indent="  ")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    said = [wrap(f"{result['device']}, {result['date']}: {versions}."), ""]
    for direction, words in DIRECTIONS.items():
        ratios = [ratio for row in result["calls"] if (ratio := speed(row, direction))]
        if ratios:
            ahead, mean = sum(ratio >= 1 for ratio in ratios), statistics.geometric_mean(ratios)
            bounds = f"{min(ratios):.2f} to {max(ratios):.2f} × its speed, {mean:.2f} in the geometric mean"
            said.append(
                wrap(f"- {words}: at least as fast as the best peer in {ahead} of {len(ratios)} calls, {bounds}")
            )
    head = [
        "model",
        "call",
        "forward, ms",
        "best peer",
        "×",
        "forward + backward, ms",
        "best peer",
        "×",
        "error",
        "kernels",
    ]
    said += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in by_family(result):
        errors, ran = row["implementations"][OURS].get("error"), row.get("ran", {})
        kernels = " / ".join(dict.fromkeys(one["platform"] for one in ran.values()))
        cells = [row["model"], row["shape"], *_cells(row, "forward"), *_cells(row, "both")]
        cells += [f"{max(errors.values()):.4f}" if errors else "—", kernels or "—"]
        said.append(f"| {' | '.join(cells)} |")
    return "\n".join(said)
