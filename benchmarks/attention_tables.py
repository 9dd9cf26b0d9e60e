"""The tables that benchmarks/attention_gpu.py prints at its end."""


def table(title, header, rows):
    if not rows:
        return
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def short(name):
    return name.replace("ejkernel", "ej").replace("upstream triton", "upstream").replace("mosaic_gpu", "mosaic")


def names_of(rows):
    return list(dict.fromkeys(row["implementation"] for row in rows))


def pair(row):
    if row is None or "forward_tflops" not in row:
        return "—"
    return f"{row['forward_tflops']:.0f}/" + (f"{row['backward_tflops']:.0f}" if "backward_tflops" in row else "—")


def grid(title, rows, corner, key, words, cell):
    """A row a key, a column an implementation."""
    names = names_of(rows)
    found = {(key(row), row["implementation"]): row for row in rows}
    lines = [[words(k), *(cell(found.get((k, name))) for name in names)] for k in sorted({key(row) for row in rows})]
    table(title, [corner, *map(short, names)], lines)


def show(results, parts, features):
    """Print the tables of a result; `features` gives their order."""
    cells, errors = results.rows("cells"), results.rows("errors")
    grid(
        "TFLOP/s, forward/backward",
        cells,
        "cell",
        lambda row: (row["head_dim"], row["length"], row["causal"]),
        lambda k: f"{k[0]} {k[1] // 1024}k {'causal' if k[2] else 'full'}",
        pair,
    )
    chosen = {
        f"{r['head_dim']} {r['length'] // 1024}k {'causal' if r['causal'] else 'full'}": r["ran"]
        for r in cells
        if "ran" in r
    }
    if chosen:
        print("unpinned forward:", ", ".join(f"{cell}: {ran}" for cell, ran in chosen.items()))
    unsteady = [
        f"{short(n)}"
        for n in names_of(cells)
        if any(r.get("repeats") is False for r in cells if r["implementation"] == n)
    ]
    print("backward not the same bits twice:", ", ".join(unsteady) or "none")
    table(
        "Window of 1024 at 16k, 16 heads × 128, forward",
        ["", "ms"],
        [
            [short(r["implementation"]), f"{r['forward_ms']:.3f}" if "forward_ms" in r else "—"]
            for r in results.rows("window")
        ],
    )
    order = {name: number for number, name in enumerate(features)}
    grid(
        "Features at 128, 8k, causal: forward ms, forward and backward ms (multiples of plain)",
        results.rows("features"),
        "feature",
        lambda row: (order.get(row["feature"], 99), row["feature"]),
        lambda k: k[1],
        lambda r: (
            "—"
            if r is None or "forward_ms" not in r
            else f"{r['forward_ms']:.2f} ({r.get('forward_ratio', 0):.2f}), "
            f"{r.get('both_ms', 0):.2f} ({r.get('both_ratio', 0):.2f})"
        ),
    )
    grid(
        "Relative error against float64, the largest of out, dq, dk, dv (*: not the same bits twice)",
        errors,
        "case",
        lambda row: (row["head_dim"], row["feature"]),
        lambda k: f"{k[0]} {k[1]}",
        lambda r: (
            "—" if r is None or "errors" not in r else f"{max(r['errors'].values()):.1e}{'' if r['repeats'] else '*'}"
        ),
    )
    grid(
        "Compile seconds, forward, forward and backward: cold; warm",
        results.rows("compile"),
        "head dim",
        lambda row: (row["head_dim"],),
        lambda k: k[0],
        lambda r: (
            "—"
            if r is None or "cold_forward_s" not in r
            else "; ".join(f"{r.get(f'{t}_forward_s', 0):.2f}, {r.get(f'{t}_both_s', 0):.2f}" for t in ("cold", "warm"))
        ),
    )
    show_failures(results, parts)


def show_failures(results, parts):
    """Each reason once, with how often it came."""
    counts = {}
    for part in parts:
        for row in results.rows(part) if part != "peers" else ():
            for name in ("failed", "backward_failed"):
                if name in row:
                    said = (part, short(row["implementation"]), row[name][:150])
                    counts[said] = counts.get(said, 0) + 1
    for (part, name, words), count in list(counts.items())[:30]:
        print(f"{count} × {part}, {name}: {words}")
