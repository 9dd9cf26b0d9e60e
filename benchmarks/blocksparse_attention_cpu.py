"""blocksparse_attention beside dense flash_attention on XLA on a CPU.

    python benchmarks/blocksparse_attention_cpu.py [--out benchmarks/results/blocksparse_attention_cpu.json]

float32, 8 heads × 64, batch 1, 4096 positions; a tenth of the blocks, at random. ``one mask`` serves all heads, ``head
masks`` are one a head; a traced mask is an argument of the compiled function, the others are constants of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from shared import best_of, jax_run, main

from ejkernel import blocksparse_attention, flash_attention

LENGTH, HEADS, DIM, DENSITY = 4096, 8, 64, 0.1


def gradients(f):
    return jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))


def mask_of(rng, shape):
    """Exactly a tenth of the blocks."""
    mask = np.zeros(int(np.prod(shape)), bool)
    mask[rng.permutation(mask.size)[: round(DENSITY * mask.size)]] = True
    return mask.reshape(shape)


def measure(rounds):
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal((1, LENGTH, HEADS, DIM)), jnp.float32) for _ in range(3))
    rows = []
    for block in (64, 128):
        n = LENGTH // block
        shared, own = mask_of(rng, (n, n)), mask_of(rng, (HEADS, n, n))

        def sparse(mask, block=block):
            return lambda q, k, v: blocksparse_attention(q, k, v, mask, block)

        for what, wrap in (("forward", lambda f: f), ("forward+backward", gradients)):
            runs = {
                "dense": jax_run(wrap(flash_attention), *args),
                "one mask": jax_run(wrap(sparse(shared)), *args),
                "head masks": jax_run(wrap(sparse(own)), *args),
                "traced mask": jax_run(lambda m, *a, wrap=wrap: wrap(sparse(m))(*a), jnp.asarray(shared), *args),
            }
            times = best_of(runs, rounds)
            row = {
                "case": f"block {block} {what}",
                "density": DENSITY,
                **{f"{name} ms": t * 1e3 for name, t in times.items()},
            }
            row |= {f"{name} / dense": t / times["dense"] for name, t in times.items() if name != "dense"}
            rows.append(row)
            print(row, flush=True)
    return {"rows": rows}


if __name__ == "__main__":
    main(__doc__, measure)
