"""Tables that the package ships, from committed results: grouped_matmul, recurrent and mean_pooling on an H200.

    python benchmarks/shipped_rows.py [FOLDER]      ejkernel/tuned/nvidia-h200 if not given

A row is the fastest tile of an implementation. A backward of recurrent layers is what is left of both directions without the
forward; one of grouped_matmul is both gradients, in a tile that both were timed in.
"""

import json
import re
import sys
from pathlib import Path

import jax

from ejkernel import explain, kernel_registry
from ejkernel.contracts.device import describe
from ejkernel.contracts.params import params_class

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DEVICE = "nvidia-h200"
GATES = {"lstm": 4, "gru": 3}
TILES = {
    "pallas": ("blocksize_m", "blocksize_n", "num_stages"),
    "triton": ("blocksize_m", "blocksize_n", "blocksize_k", "num_warps", "num_stages"),
}


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def row(call, platform, direction, seconds, tile=()):
    """A row of a table; the tile as the kernel takes it."""
    (entry,) = (
        entry
        for entry in kernel_registry.list_implementations(call.algorithm)
        if (entry.platform.value, entry.backend.value) == (platform, "gpu")
    )
    asked = params_class(direction)(**dict(zip(TILES.get(platform, ()), tile, strict=False)))
    params = entry.effective(call.shapes, call.spec, asked, describe(DEVICE), direction).to_dict() if tile else {}
    named = {"direction": direction, "implementation": entry.name, "version": entry.version}
    return {**named, "call": dict(call.bucket), "params": params, "seconds": seconds}


def recurrent(results):
    for name in dict.fromkeys(record["case"] for record in results["times"]):
        cell, dtype, batch, steps, size = re.split("[ ×]", name)
        batch, steps, size = int(batch), int(steps), int(size)
        weights = {
            "weight_ih": array(dtype, GATES[cell] * size, size),
            "weight_hh": array(dtype, GATES[cell] * size, size),
        }
        call = explain("recurrent", array(dtype, batch, steps, size), None, weights, cell, device=DEVICE).call
        forward, both = (
            {own: found["ms"] / 1e3 for own, found in record["implementations"].items() if "ms" in found}
            for record in results["times"]
            if record["case"] == name
        )
        for platform in ("cuda", "triton"):
            yield row(call, platform, "forward", forward[platform])
            yield row(call, platform, "backward", both[platform] - forward[platform])


def grouped_matmul(results):
    times = {}
    for record in results["times"]:
        found = re.fullmatch(r"(\w+) (\d+)×(\d+) · (\d+)×\(\d+×(\d+)\), dirichlet", record["case"])
        platform, _, tile = record["implementation"].partition(" ")
        if found and platform in TILES and tile and tile[0].isdigit() and "ms" in record:
            sizes = tuple(map(int, tile.split("×")))
            times.setdefault((found.groups(), platform), {})[record["direction"], sizes] = record["ms"] / 1e3
    for ((dtype, *sizes), platform), own in times.items():
        m, k, groups, n = map(int, sizes)
        arrays = array(dtype, m, k), array(dtype, groups, k, n), array("int32", groups)
        call = explain("grouped_matmul", *arrays, device=DEVICE).call
        forward = {tile: seconds for (direction, tile), seconds in own.items() if direction == "forward"}
        gradients = {}
        for (direction, tile), seconds in own.items():
            # On Hopper the gradient of b has tiles of 128 rows, whatever is asked for.
            other = (128, *tile[1:]) if platform == "pallas" else tile
            if direction == "gradient of a" and ("gradient of b", other) in own:
                gradients[tile] = seconds + own["gradient of b", other]
        for direction, found in (("forward", forward), ("backward", gradients)):
            if found:
                tile = min(found, key=found.get)
                yield row(call, platform, direction, found[tile], tile)


def mean_pooling(results):
    for record in results["times"]:
        packed = re.fullmatch(r"packed (\d+)x(\d+), (\d+) sequences", record["case"])
        masked = re.fullmatch(r"(\d+)x(\d+)x(\d+), masked", record["case"])
        if record["implementation"] != "triton" or not (packed or masked):
            continue
        if packed:
            tokens, features, sequences = map(int, packed.groups())
            given = {"inputs": array("bfloat16", tokens, features), "cu_seqlens": array("int32", sequences + 1)}
        else:
            shape = tuple(map(int, masked.groups()))
            given = {"inputs": array("bfloat16", *shape), "mask": array("bool", *shape[:2])}
        call = explain("mean_pooling", **given, device=DEVICE).call
        yield row(call, "triton", record["direction"], record["us"] / 1e6)


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "ejkernel" / "tuned" / DEVICE
    for make in (recurrent, grouped_matmul, mean_pooling):
        results = json.loads((RESULTS / f"{make.__name__}_h200.json").read_text())
        measured = {name: results["versions"][name] for name in ("jax", "jaxlib")}
        entries = sorted(make(results), key=lambda entry: json.dumps(entry, sort_keys=True))
        table = {"device": DEVICE, "measured": measured, "entries": entries}
        (folder / f"{make.__name__}.json").write_text(json.dumps(table, indent=1) + "\n")
        print(f"{make.__name__}: {len(entries)} rows")


if __name__ == "__main__":
    main()
