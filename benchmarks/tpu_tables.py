"""What `tpu_cycles.py` predicted: tables for docs/tpu.md, and those that are shipped, which rank implementations on TPUs.

python benchmarks/tpu_tables.py            write ejkernel/tuned/tpu-*/, from benchmarks/results/tpu_cycles.json
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "tpu_cycles.json"
TUNED = Path(__file__).parents[1] / "ejkernel" / "tuned"
OURS = "ejkernel"
# As rows name them, and as chips are named.
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "v7")
SHOWN = {"v7": "tpu7x"}
DIRECTIONS = ("forward", "backward")
PLAIN = "head dim 128"
LONG, WINDOW = f"{PLAIN}, length 16384", f"{PLAIN}, length 16384, window of 1024"


def split(row):
    """``(generation, call)`` of a row."""
    generation, _, call = row["call"].partition(", ")
    return generation, call


def by_call(rows):
    """``{(call, direction): {generation: {implementation: row}}}``, of rows with cycles."""
    found = {}
    for row in rows:
        if "kilocycles" in row:
            generation, call = split(row)
            place = found.setdefault((call, row["direction"]), {}).setdefault(generation, {})
            place[row["implementation"]] = row
    return found


def lines(header, rows):
    """A table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def thousands(row):
    return f"{row['kilocycles']:.4g}" if row else ""


def named(generation):
    return SHOWN.get(generation, generation)


def beside_peers(calls, keys, columns):
    """A line for each call and generation: ours, the peers, ours over the best of them, predicted time."""
    peers = list(
        dict.fromkeys(name for key in keys for at in calls.get(key, {}).values() for name in at if name != OURS)
    )
    copied = any(
        "copies_kilocycles" in row for key in keys for at in calls.get(key, {}).values() for row in at.values()
    )
    out = []
    for key in keys:
        for generation in GENERATIONS:
            at = calls.get(key, {}).get(generation, {})
            if OURS not in at:
                continue
            ours, others = at[OURS], [at[name]["kilocycles"] for name in peers if name in at]
            least = [f"{ours['copies_kilocycles']:.4g}" if "copies_kilocycles" in ours else ""] * copied
            ratio = f"{ours['kilocycles'] / min(others):.2f}" if others else ""
            busy = f"{ours['mxu_percent']:.0f} %" if "mxu_percent" in ours else ""
            time = f"{ours['predicted_ms']:.3g} ms" if "predicted_ms" in ours else ""
            cells = [thousands(ours), *(thousands(at.get(name)) for name in peers), *least, ratio, busy, time]
            out.append([*columns(key), named(generation), *cells])
    head = [OURS, *peers, *["copies"] * copied, "over the best peer", "matrix units busy", "predicted"]
    return out, ["generation", *head]


def features(calls):
    """Calls of ours over the plain one; that with a window over its share of the pairs that all keys have."""
    names = [call for call, _ in calls if call.startswith(f"{PLAIN}, ") and call not in (LONG, WINDOW)]
    out = []
    for direction in DIRECTIONS:
        for generation in GENERATIONS:
            plain = calls.get((PLAIN, direction), {}).get(generation, {}).get(OURS)
            found = {n: calls.get((n, direction), {}).get(generation, {}).get(OURS) for n in dict.fromkeys(names)}
            if plain is None or not any(found.values()):
                continue
            ratios = [f"{row['kilocycles'] / plain['kilocycles']:.2f}" if row else "" for row in found.values()]
            out.append([direction, named(generation), *ratios])
    head = ["direction", "generation", *(name.removeprefix(f"{PLAIN}, ") for name in dict.fromkeys(names))]
    return lines(head, out) if out else []


def windows(calls):
    """A window's cycles over those of all keys, beside the share of blocks of 1024 by 1024 that it leaves of theirs."""
    blocks = 16
    share = (2 * blocks - 1) / (blocks * (blocks + 1) / 2)
    out = []
    for direction in DIRECTIONS:
        for generation in GENERATIONS:
            pair = [calls.get((name, direction), {}).get(generation, {}).get(OURS) for name in (WINDOW, LONG)]
            if all(pair):
                ratio = pair[0]["kilocycles"] / pair[1]["kilocycles"]
                cells = [thousands(row) for row in pair]
                out.append(
                    [direction, named(generation), *cells, f"{ratio:.3f}", f"{share:.3f}", f"{ratio / share:.2f}"]
                )
    head = ["direction", "generation", "window", "all keys", "ratio", "share of blocks", "ratio over share"]
    return lines(head, out) if out else []


def grouped(calls):
    """Whole products."""
    keys = [key for key in calls if key[0].endswith("groups")]
    rows, head = beside_peers(calls, keys, lambda key: [key[0]])
    at = [calls[key][g][OURS] for key in keys for g in GENERATIONS if OURS in calls[key].get(g, {})]
    columns = {
        "times_the_dense_product": "× dense",
        "times_the_dense_product_and_partial_tiles": "× dense and partial tiles",
    }
    rows = [[*row, *(f"{ours[name]:.2f}" for name in columns)] for row, ours in zip(rows, at, strict=True)]
    return lines(["rows × contraction × columns", *head, *columns.values()], rows) if rows else []


def markdown(result):
    """All tables."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    flash = by_call(result.get("flash_attention", []))
    pages = by_call(result.get("page_attention", []))
    products = by_call(result.get("grouped_matmul", []))
    said = [f"Predicted with {versions}, {result['date']}."]

    def add(words, table):
        if table:
            said.extend(["", *words, "", *table])

    for direction in DIRECTIONS:
        keys = [key for key in flash if key[1] == direction and not key[0].startswith(f"{PLAIN}, ")]
        rows, head = beside_peers(flash, keys, lambda key: [key[0].replace("head ", "")])
        add([f"Flash attention, {direction}: thousand cycles a query head, 8192 tokens, causal, bfloat16, 32 query heads and 8 key",
             "heads. Times are of the call on one device."], lines(["", *head], rows) if rows else [])  # fmt: skip
    add(["Features: cycles over those of the plain call of head dim 128."], features(flash))
    add(["A causal window of 1024 among 16384 keys, head dim 128, thousand cycles a query head."], windows(flash))
    rows, head = beside_peers(pages, list(pages), lambda key: [key[0].split(", 1024")[0].removeprefix("decoding, ")])
    add(["Page attention, decoding of 64 sequences of 4096 tokens, 32 query heads and 8 key heads, of 128 where nothing is",
         "said: thousand cycles for 1024 keys of all heads, and those that copying their bytes takes at the chip's bandwidth.",
         "The longer one is the time."],
        lines(["pages", *head], rows) if rows else [])  # fmt: skip
    steps = [key for key in products if not key[0].endswith("groups")]
    rows, head = beside_peers(products, steps, lambda key: [key[1]])
    add(["Grouped matmul: thousand cycles of the main step, 512 rows, 1024 of the contraction, 1024 columns."],
        lines(["", *head[:-1]], [row[:-1] for row in rows]) if rows else [])  # fmt: skip
    add(["Grouped matmul: thousand cycles of whole products whose rows are drawn at random from the groups; beside the same",
         "kernel's product without groups, and that plus a whole tile for each tile that one more group has rows in."],
        grouped(products))  # fmt: skip
    return "\n".join(said) + "\n"


def shipped(result):
    """``{chip: {operation: table}}``: what is predicted of our kernels, with the sizes that they choose themselves."""
    from tpu_cells import CELLS

    from ejkernel import explain

    cells = {(cell.part, cell.call, cell.direction): cell for cell in CELLS if cell.asked}
    made = {}
    for part in ("flash_attention", "page_attention", "grouped_matmul"):
        for row in result.get(part, []):
            generation, call = split(row)
            cell = cells.get((part, call, row["direction"]))
            if cell is None or row["implementation"] != OURS or "predicted_ms" not in row:
                continue
            operation, arrays, options = cell.asked
            chip, backward = f"tpu-{generation}", row["direction"] == "backward"
            asked = explain(operation, *arrays, **options, device=chip, gradients=backward, platform="pallas")
            kernel = (asked.backward if backward else asked).chosen.implementation
            entry = {
                "direction": row["direction"],
                "implementation": kernel.name,
                "version": kernel.version,
                "call": dict(asked.call.bucket),
                "params": {},
                "seconds": row["predicted_ms"] / 1e3,
            }
            rows = made.setdefault(chip, {}).setdefault(operation, {})
            key = json.dumps([entry["direction"], entry["call"]], sort_keys=True)
            # Calls that a bucket does not tell apart: the slower one's.
            if key not in rows or rows[key]["seconds"] < entry["seconds"]:
                rows[key] = entry
    versions = {name: version for name, version in result["versions"].items() if name != "tokamax"}
    return {
        chip: {
            operation: {"device": chip, "predicted": versions, "entries": [rows[key] for key in sorted(rows)]}
            for operation, rows in tables.items()
        }
        for chip, tables in made.items()
    }


def main():
    for chip, tables in shipped(json.loads(RESULTS.read_text())).items():
        for operation, table in tables.items():
            path = TUNED / chip / f"{operation}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
