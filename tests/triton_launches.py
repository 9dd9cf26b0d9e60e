"""What the Triton kernels of a call are compiled to, for chips that are not there."""

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

from ejkernel.kernels._triton.call import passes_twice

triton = pytest.importorskip("triton", reason="triton is not installed")

# The default blocks were picked with this one; what another compiler spills is not ours to promise.
PICKED_WITH = "3.6."


class Launch:
    """One call of ``call``, as the module makes it."""

    def __init__(
        self, kernel, arrays, scalars, outputs, *, programs, constants, num_warps, num_stages, device, in_place=None
    ):
        assert device is not None
        self.kernel, self.scalars, self.constants = kernel, scalars, constants
        again = range(len(outputs)) if passes_twice() else set(range(len(outputs))) - set((in_place or {}).values())
        self.dtypes = [x.dtype for x in arrays], [outputs[i].dtype for i in again]
        self.options = {"num_warps": num_warps, "num_stages": num_stages}

    def compiled(self, chip):
        """For a chip, with what jax-triton tells the compiler: arrays are aligned, a scalar of 1 is a constant."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        before, after = ([f"*{NAMES[jnp.dtype(d).name]}" for d in part] for part in self.dtypes)
        kinds = [*before, *("constexpr" if x == 1 else "i32" for x in self.scalars), *after, "constexpr"]
        signature = dict(zip(self.kernel.arg_names, kinds, strict=True))
        ones = {name: 1 for name, kind in signature.items() if kind == "constexpr" and name != "C"}
        source = ASTSource(
            self.kernel,
            signature=signature,
            constexprs={"C": self.constants, **ones},
            attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds) if kind.startswith("*")},
        )
        nvidia = chip.vendor == "nvidia"
        gpu = GPUTarget("cuda", chip.capability, 32) if nvidia else GPUTarget("hip", chip.arch, 64)
        return triton.compile(source, target=gpu, options=self.options)


NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "uint32": "u32",
    "uint8": "u8",
    "int8": "i8",
    "bool": "i1",
}


def resources(compiled):
    """``(bytes or registers spilled to memory, bytes of shared memory)``."""
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        # Scalar registers are spilled into vector registers, not to memory: what does not fit there is scratch.
        counts = (r"\.vgpr_spill_count:", r"\.private_segment_fixed_size:")
        return sum(int(re.search(rf"{name}\s+(\d+)", text)[1]) for name in counts), compiled.metadata.shared
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.search(r"STACK:(\d+) .*LOCAL:(\d+)", text).groups())), compiled.metadata.shared


@functools.cache
def kept_compilations():
    """Triton's own cache, between runs of the suite."""
    triton.knobs.cache.dir = str(Path(__file__).parents[1] / ".cache" / "triton")
