"""The CUDA platform where there is no GPU: what is built and kept, who is refused, and how the recurrent product is divided."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tries
from hypothesis import given
from hypothesis import strategies as st

from ejkernel import BwdParams, FwdParams, Platform, UnsupportedError, explain, recurrent, target
from ejkernel.callib.chips import CHIPS
from ejkernel.contracts.device import describe
from ejkernel.kernels._cuda import build, call, recurrent_plan, toolchain
from ejkernel.kernels._cuda import recurrent as kernel
from ejkernel.kernels._cuda.call import Capacity
from ejkernel.kernels._cuda.recurrent_plan import BLOCK_BATCH, BLOCK_UNITS, WARPS, packed, plan
from ejkernel.kernels._cuda.toolchain import BuildError
from ejkernel.kernels.common.recurrent import GATES, PLANES

slow = pytest.mark.slow
NVIDIA = sorted(name for name, chip in CHIPS.items() if chip.vendor == "nvidia" and chip.capability >= call.OLDEST)
H200 = "nvidia-h200"


# --- a compiler that says what it was asked ------------------------------------------------------------------------------

# Its machine code is its options; it writes one half, waits, and writes the other.
COMPILER = """\
#!/bin/sh
case "$1" in
--version) echo "fake nvcc $FAKE_VERSION"; exit;;
--list-gpu-arch) echo compute_80; echo compute_90; exit;;
esac
echo $$ >> "$FAKE_LOG"
if [ -n "$FAKE_ERROR" ]; then echo "kernel.cu(3): error: $FAKE_ERROR" >&2; exit 2; fi
kept=""
for option; do case "$option" in -D*|-gencode*) kept="$kept $option";; esac; done
printf 'first half' > "$option"
[ -n "$FAKE_SECONDS" ] && sleep "$FAKE_SECONDS"
[ -n "$FAKE_GATE" ] && while [ ! -e "$FAKE_GATE" ]; do sleep 0.1; done
printf 'machine code%s' "$kept" > "$option"
"""


REMEMBERED = (
    build.cubin,
    build.launcher,
    toolchain.device_compiler,
    toolchain.host_compiler,
    call._compilers,
    call._probe,
)


def forget():
    for remembered in REMEMBERED:
        remembered.cache_clear()


@pytest.fixture
def fresh():
    """Nothing is remembered of compilers and of what they made."""
    forget()
    yield
    forget()


class Fake:
    """The only nvcc on the path, and sources of its own."""

    def __init__(self, folder, monkeypatch):
        self.log, self.monkeypatch, self.bin = folder / "compilations", monkeypatch, folder / "bin"
        self.bin.mkdir()
        nvcc = self.bin / "nvcc"
        nvcc.write_text(COMPILER)
        nvcc.chmod(0o755)
        self.sources = folder / "sources"
        shutil.copytree(toolchain.SOURCES, self.sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        monkeypatch.setattr(toolchain, "SOURCES", self.sources)
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_LOG", str(self.log))
        self.set(version="1.0")

    def set(self, **values):
        for name, value in values.items():
            self.monkeypatch.setenv(f"FAKE_{name.upper()}", value)
        forget()

    @property
    def compilations(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def fake(tmp_path, monkeypatch, fresh):
    return Fake(tmp_path, monkeypatch)


def kept(store, suffix=".cubin"):
    return sorted((store / "cuda").glob(f"*{suffix}"))


def probe(architecture="sm_90a", macros=()):
    """As a new process would: nothing is remembered but what is in the store."""
    forget()
    return build.cubin("probe.cu", architecture, macros)


# --- what is built -------------------------------------------------------------------------------------------------------


def test_what_was_built_is_found_again(fake, own_store):
    code = probe(macros=(("SIZE", 3),))
    assert code == b"machine code -gencode=arch=compute_90a,code=sm_90a -DSIZE=3"
    assert probe(macros=(("SIZE", 3),)) == code
    assert fake.compilations == 1
    (entry,) = kept(own_store)
    assert entry.name.startswith("probe-sm_90a-")
    assert not kept(own_store, build.PARTIAL)


def test_an_entry_is_of_all_that_it_was_made_from(fake, own_store, monkeypatch):
    def changed_text(name):
        path = fake.sources / name
        path.write_text(path.read_text() + "\n// changed\n")

    def changed_options(text):
        other = fake.sources / "toolchain.py"
        other.write_text(text)
        monkeypatch.setattr(toolchain, "__file__", str(other))

    probe()
    changes = [
        lambda: probe(macros=(("SIZE", 1),)),
        lambda: probe(macros=(("SIZE", 2),)),
        lambda: probe(architecture="sm_80"),
        lambda: (changed_text("probe.cu"), probe()),
        lambda: (changed_text("primitives.cuh"), probe()),
        lambda: (fake.set(version="1.1"), probe()),
        lambda: (changed_options("-O2"), probe()),
    ]
    for number, change in enumerate(changes, 2):
        change()
        assert fake.compilations == len(kept(own_store)) == number
    probe()
    assert fake.compilations == len(kept(own_store))
    changed_text("recurrent_forward.cu")  # which the probe does not include
    probe()
    assert fake.compilations == len(kept(own_store))


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "half of a digest", "gone"])
def test_a_damaged_entry_is_made_again(fake, own_store, damage):
    code = probe()
    (entry,) = kept(own_store)
    whole = entry.read_bytes()
    middle = len(code) // 2
    damaged = {
        "cut": whole[:-7],
        "empty": b"",
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "half of a digest": whole[len(code) : len(code) + 16],
    }
    entry.write_bytes(damaged[damage]) if damage in damaged else entry.unlink()
    assert probe() == code
    assert fake.compilations == 2
    assert entry.read_bytes() == whole


def test_threads_build_an_entry_once(fake, own_store):
    fake.set(seconds="0.3")
    found = []
    threads = [threading.Thread(target=lambda: found.append(build.cubin("probe.cu", "sm_90a", ()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert fake.compilations == 1


def test_one_that_cannot_have_the_lock_builds_all_the_same(fake, own_store, monkeypatch):
    code = probe()
    (entry,) = kept(own_store)
    entry.unlink()
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.05)
    with filelock.FileLock(entry.with_suffix(".lock")):
        assert probe() == code
    assert entry.exists()


def test_without_a_place_to_keep_it_a_cubin_is_made_each_time(fake, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert probe() == probe()
    assert fake.compilations == 2
    library = type("Compiler", (), {"identity": "fake", "library": lambda *_: b"library"})()
    monkeypatch.setattr(toolchain, "host_compiler", lambda: library)
    with pytest.raises(BuildError, match="folder cannot be written"):
        build.launcher()


# In a process of its own: it forks before any thread is there.
RACE = """
import json, os, signal, sys, time
from pathlib import Path

from ejkernel.kernels._cuda import build

store, log = Path(os.environ["EJKERNEL_CACHE_DIR"]) / "cuda", Path(os.environ["FAKE_LOG"])
marks = Path(sys.argv[1])


def child(name, before=lambda: None):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        before()
        code = build.cubin("probe.cu", "sm_90a", ())
        (marks / name).write_bytes(code)
        status = 0
    finally:
        os._exit(status)


def when(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.01)


def count():
    return len(log.read_text().splitlines()) if log.exists() else 0


def killed(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return sorted(path.suffix for path in store.iterdir())


def stuck():
    del os.environ["FAKE_GATE"]

    def never(_):
        (marks / "writing").touch()
        time.sleep(60)

    build.os.fsync = never


victim = child("compiling")
when(lambda: count() == 1)
told = {"while it compiles": killed(victim)}
victim = child("written", stuck)
when((marks / "writing").exists)
told["while it writes"] = killed(victim)
before = count()
Path(os.environ.pop("FAKE_GATE")).touch()  # the compiler whose process was killed ends too
os.environ["FAKE_SECONDS"] = "0.5"
eight = [child(f"eight-{i}", lambda: when((marks / "go").exists)) for i in range(8)]
(marks / "go").touch()
told["statuses"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in eight]
told["compilations"] = count() - before
print(json.dumps(told))
"""


def test_a_build_that_is_killed_and_eight_at_once(fake, own_store, tmp_path):
    """One dies while its compiler runs and one while it writes; then eight find nothing damaged, and one of them builds."""
    marks = tmp_path / "marks"
    marks.mkdir()
    fake.set(gate=str(tmp_path / "gate"))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RACE, str(marks)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "TMPDIR": str(marks)},
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert build.PARTIAL not in told["while it compiles"]
    assert build.PARTIAL in told["while it writes"]
    assert ".cubin" not in {*told["while it compiles"], *told["while it writes"]}
    assert told["statuses"] == [0] * 8
    assert told["compilations"] == 1
    codes = {path.read_bytes() for path in marks.glob("eight-*")}
    (entry,) = kept(own_store)
    assert codes == {build._read(entry)} == {b"machine code -gencode=arch=compute_90a,code=sm_90a"}
    assert not kept(own_store, build.PARTIAL)
    with filelock.FileLock(entry.with_suffix(".lock"), timeout=0):
        pass


def test_errors_hold_what_the_compiler_said(fake, own_store):
    fake.set(error="expected a ';'")
    with pytest.raises(BuildError, match=r"nvcc .*probe\.cu.* failed:\nkernel\.cu\(3\): error: expected a ';'"):
        probe()
    assert not kept(own_store)
    fake.set(error="")
    assert probe()


def test_a_compiler_that_never_ends_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(toolchain, "SECONDS", 0.2)
    fake.set(seconds="2")
    with pytest.raises(BuildError, match=r"nvcc cannot be run: .*timed out"):
        probe()


def test_a_compiler_that_cannot_be_run_is_none(fake, monkeypatch):
    monkeypatch.setattr(toolchain, "_nvrtc_libraries", list)
    monkeypatch.setenv("PATH", str(fake.bin))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert toolchain.device_compiler().path == str(fake.bin / "nvcc")
    (fake.bin / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    forget()
    found = toolchain.device_compiler()
    assert found is None or found.path != str(fake.bin / "nvcc")


def test_the_host_compiler_that_cxx_names_comes_first(tmp_path, monkeypatch, fresh):
    own = tmp_path / "own-c++"
    own.write_text("#!/bin/sh\necho own compiler 1\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    found = toolchain.host_compiler()
    assert (found.path, found.identity) == (str(own), f"{own} own compiler 1")
    with pytest.raises(FileNotFoundError):
        found.library(own, ".")  # it makes nothing


# --- with the compilers of this machine -----------------------------------------------------------------------------------


def needs(compiler):
    """A device's compiler that is there and knows the architectures, or a host's; else the test is skipped, and says why."""
    found = toolchain.device_compiler() if compiler == "device" else toolchain.host_compiler()
    if found is None:
        pytest.skip(f"needs {'nvcc or NVRTC' if compiler == 'device' else 'a C++ compiler'}, which is not here")
    return found


def needs_capability(capability):
    if capability not in needs("device").architectures():
        pytest.skip(f"{toolchain.device_compiler().identity.splitlines()[0]} knows no capability {capability}")


@pytest.mark.compiled
def test_what_is_wrong_in_a_source_is_told(tmp_path, monkeypatch, fresh):
    needs("device")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { not_declared; }\n')
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"(?s)broken\.cu.*not_declared"):
        build.cubin("broken.cu", "sm_80", ())


@pytest.mark.compiled
def test_what_is_wrong_in_the_launcher_is_told(tmp_path, monkeypatch, fresh):
    needs("host")
    (tmp_path / build.LAUNCHER).write_text("int broken = not_declared;\n")
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match=r"(?s)launcher\.cc.*not_declared"):
        build.launcher()


@slow
@pytest.mark.compiled
def test_the_launcher_is_a_library_with_the_handler(fresh):
    import ctypes

    needs("host")
    path = build.launcher()
    assert ctypes.CDLL(str(path))[call.TARGET]
    # The digest behind it is what makes it whole.
    assert build._read(path) is not None
    forget()
    assert build.launcher() == path


# Its machine code is its options; a source with the word `wrong` is one.
NVRTC = r"""
#include <stdlib.h>
#include <string.h>
static char said[4096];
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 2; return 0; }
int nvrtcGetNumSupportedArchs(int* count) { *count = 2; return 0; }
int nvrtcGetSupportedArchs(int* found) { found[0] = 80; found[1] = 90; return 0; }
const char* nvrtcGetErrorString(int status) { return status == 7 ? "internal error" : "no error"; }
int nvrtcCreateProgram(void** program, const char* source, const char* name, int, const char**, const char**) {
  if (strstr(source, "crash")) return 7;
  *program = strdup(source);
  return 0;
}
int nvrtcCompileProgram(void* program, int count, const char** options) {
  said[0] = 0;
  for (int i = 0; i < count; ++i) strcat(strcat(said, options[i]), " ");
  if (!strstr((char*)program, "wrong")) return 0;
  strcpy(said, "own.cu(1): error: it is wrong");
  return 6;
}
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = strlen(said) + 1; return 0; }
int nvrtcGetProgramLog(void*, char* text) { strcpy(text, said); return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { *size = strlen(said); return 0; }
int nvrtcGetCUBIN(void*, char* code) { memcpy(code, said, strlen(said)); return 0; }
int nvrtcDestroyProgram(void** program) { free(*program); *program = 0; return 0; }
"""


@slow
@pytest.mark.compiled
def test_without_nvcc_it_is_nvrtc_of_the_packages(tmp_path, monkeypatch, fresh, own_store):
    host = needs("host")
    libraries, sources = tmp_path / "site" / "nvidia" / "cu13" / "lib", tmp_path / "sources"
    libraries.mkdir(parents=True)
    sources.mkdir()
    source = tmp_path / "nvrtc.cc"
    source.write_text('extern "C" {\n' + NVRTC + "}\n")
    (libraries / "libnvrtc.so.13").write_bytes(host.library(source, str(tmp_path)))
    (libraries / "libnvrtc.so.12").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "nvcc" else which(name, **more))
    monkeypatch.setattr(toolchain, "SOURCES", sources)
    compiler = toolchain.device_compiler()
    assert compiler.identity == f"NVRTC 13.2 {libraries / 'libnvrtc.so.13'}"
    assert compiler.architectures() == {80, 90}
    for name, text in (("right", ""), ("wrong", "wrong"), ("crash", "crash")):
        (sources / f"{name}.cu").write_text(text)
    code = build.cubin("right.cu", "sm_90a", (("SIZE", 3),))
    assert code.decode().split() == ["-arch=sm_90a", "-std=c++17", f"-I{sources}", "-DSIZE=3"]
    with pytest.raises(
        BuildError, match=r"NVRTC 13\.2 .* cannot compile wrong\.cu:\nown\.cu\(1\): error: it is wrong$"
    ):
        build.cubin("wrong.cu", "sm_90a", ())
    with pytest.raises(BuildError, match="nvrtcCreateProgram: internal error"):
        build.cubin("crash.cu", "sm_90a", ())


@functools.cache
def cuobjdump():
    beside = toolchain.device_compiler()
    places = [Path(beside.path).parent] if isinstance(beside, toolchain.Nvcc) else []
    try:
        import triton

        places.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    except ImportError:
        pass
    return next((found for place in places if (found := shutil.which("cuobjdump", path=str(place)))), None)


def compiled(chip, cell, direction, dtype, batch, size, activation="tanh", lengths=None):
    """``(registers, bytes spilled)`` of a loop's kernel as a call on the chip has it."""
    device = describe(chip)
    needs_capability(device.capability)
    if cuobjdump() is None:
        pytest.skip("there is no cuobjdump: neither of a toolkit nor of Triton")
    problem = kernel._problem(cell, direction, -(-size // kernel.ALIGNED) * kernel.ALIGNED, batch, dtype_size(dtype))
    chosen = plan(problem, call.capacity(device))
    macros = {**chosen.macros(), "ELEMENT": kernel.ELEMENTS[dtype], "CELL": kernel.CELLS[cell, activation]}
    macros["GATES"] = problem.gates
    if direction == "backward":
        macros |= {"PLANES": PLANES[cell], "LENGTH": problem.length}
    code = build.cubin(f"recurrent_{direction}.cu", call.architecture(device), tuple(sorted(macros.items())))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [cuobjdump(), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text).groups())
    return registers, stack + local


def dtype_size(dtype):
    return jnp.dtype(dtype).itemsize


@pytest.fixture
def between_runs(monkeypatch):
    """What was built stays between runs of the suite."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "ejkernel"))


@pytest.mark.compiled
def test_a_loop_compiles_and_spills_nothing(between_runs):
    registers, spilled = compiled(H200, "lstm", "forward", "bfloat16", 64, 1024)
    assert spilled == 0
    assert registers > 200  # most hold weights


# Bytes of a thread, where weights fill the registers: how many the compiler needs itself differs from version to version.
MOST_SPILLED = {"bfloat16": 256, "float16": 256, "float32": 640}


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("cell", list(GATES))
@pytest.mark.parametrize("chip", ["nvidia-a100", H200, "nvidia-b200"])
def test_loops_compile_for_the_chips(between_runs, chip, cell, dtype):
    for direction in ("forward", "backward"):
        assert compiled(chip, cell, direction, dtype, 3, 100)[1] == 0
        assert compiled(chip, cell, direction, dtype, 64, 1024)[1] <= MOST_SPILLED[dtype]


@slow
@pytest.mark.compiled
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chip", ["nvidia-a100", H200, "nvidia-b200"])
def test_loops_that_stream_weights_compile(between_runs, chip, direction):
    assert compiled(chip, "lstm", direction, "bfloat16", 256, 2048)[1] <= MOST_SPILLED["bfloat16"]
    assert compiled(chip, "rnn", direction, "bfloat16", 3, 100, "relu")[1] == 0


# --- who is refused -------------------------------------------------------------------------------------------------------

LSTM = {
    "inputs": jax.ShapeDtypeStruct((64, 32, 1024), jnp.bfloat16),
    "weights": {name: jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16) for name in ("weight_ih", "weight_hh")},
}


class FakeCompiler:
    identity = "nvcc 1.2\nand more"

    def __init__(self, *capabilities):
        self.known = frozenset(capabilities)

    def architectures(self):
        return self.known


@pytest.fixture
def compilers(monkeypatch, fresh):
    """Sets what is installed."""

    def install(*, host=True, device=(80, 86, 89, 90, 100)):
        monkeypatch.setattr(toolchain, "host_compiler", lambda: object() if host else None)
        found = None if device is None else FakeCompiler(*device)
        monkeypatch.setattr(toolchain, "device_compiler", lambda: found)
        call._compilers.cache_clear()

    return install


def told(chip, **more):
    """``(the chosen platform, why CUDA was not chosen)``; nothing is measured of these calls."""
    explanation = explain(recurrent, **LSTM, device=chip, **more)
    reasons = {c.platform: "; ".join(c.reasons) for c in explanation.candidates}
    return explanation.chosen.platform, reasons[Platform.CUDA]


def next_best():
    import importlib.util

    both = importlib.util.find_spec("triton") and importlib.util.find_spec("jax_triton")
    return Platform.TRITON if both else Platform.XLA


def test_with_compilers_cuda_is_chosen(compilers):
    compilers()
    for chip in ("nvidia-h100", H200, "nvidia-b200"):
        explanation = explain(recurrent, **LSTM, device=chip, gradients=True)
        assert explanation.chosen.platform is explanation.backward.chosen.platform is Platform.CUDA, chip


def test_where_a_step_goes_over_the_batch_several_times_another_is_chosen(compilers):
    compilers()
    wide = {**LSTM, "inputs": jax.ShapeDtypeStruct((512, 32, 1024), jnp.bfloat16)}
    assert explain(recurrent, **wide, device=H200).chosen.platform is next_best()
    assert explain(recurrent, **wide, device=H200, platform="cuda").chosen.platform is Platform.CUDA


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"host": False}, ["needs a C++ compiler", "install g++ or clang++"]),
        ({"device": None}, ["needs nvcc", f"pip install {call.NVRTC_PACKAGE}", "jax[cuda13]"]),
        ({"device": (80,)}, ["nvcc 1.2 does not compile for capability 90", "install a newer one"]),
    ],
    ids=["no host compiler", "no device compiler", "an old one"],
)
def test_without_a_compiler_another_runs_and_says_what_to_install(compilers, installed, words):
    compilers(**installed)
    chosen, reason = told(H200)
    assert chosen is next_best()
    for word in words:
        assert word in reason
    assert "and more" not in reason
    with pytest.raises(UnsupportedError, match=re.escape(words[0])):
        explain(recurrent, **LSTM, device=H200, platform="cuda").require()


def test_a_compiler_that_tells_nothing_is_the_reason(compilers, monkeypatch):
    compilers()

    def fails():
        raise BuildError("nvcc --list-gpu-arch failed:\nno more words\nan error at last")

    monkeypatch.setattr(toolchain.device_compiler(), "architectures", fails)
    call._compilers.cache_clear()
    assert told(H200)[1] == "an error at last"


def test_what_does_not_build_is_refused_where_it_would_run(monkeypatch, fresh):
    def broken(*_):
        raise BuildError("nvcc failed:\nIn file included from x\nx.h(1): error: nothing works")

    monkeypatch.setattr(build, "cubin", broken)
    monkeypatch.setattr(call, "_register", lambda: None)
    assert call._probe("sm_90a") == "cannot be built (x.h(1): error: nothing works)"


@pytest.mark.parametrize("chip", ["nvidia-v100", "nvidia-t4"])
def test_chips_that_are_too_old(compilers, chip):
    compilers(device=(70, 75, 80))
    chosen, reason = told(chip)
    assert chosen is Platform.XLA
    assert f"needs capability ≥ {call.OLDEST / 10}" in reason
    assert f"needs capability ≥ {call.OLDEST / 10}" in call.refusal(describe(chip))


def test_chips_of_others(compilers):
    compilers()
    chosen, reason = told("amd-mi300x")
    assert chosen is Platform.XLA
    assert "nvidia" in reason


def test_names_of_architectures():
    assert [call.architecture(describe(chip)) for chip in ("nvidia-a100", H200, "nvidia-b200")] == [
        "sm_80",
        "sm_90a",
        "sm_100",
    ]


def test_what_a_launch_may_take():
    for chip in NVIDIA:
        assert call.capacity(describe(chip)) == Capacity(CHIPS[chip].sm_count, CHIPS[chip].shared_memory_per_block)
    least = min(CHIPS[chip].shared_memory_per_block for chip in NVIDIA)
    assert call.LEAST_SHARED_MEMORY <= least


def test_a_part_of_a_chip_has_its_own_multiprocessors(monkeypatch):
    device = describe(H200)
    monkeypatch.setattr(call, "is_present", lambda _: True)
    monkeypatch.setattr(call, "_multiprocessors_here", lambda: 16)
    assert call.capacity(device).multiprocessors == 16


# --- the plan ------------------------------------------------------------------------------------------------------------


def problems():
    return st.builds(
        lambda cell, direction, eighths, batch, itemsize: kernel._problem(
            cell, direction, 8 * eighths, batch, itemsize
        ),
        st.sampled_from(list(GATES)),
        st.sampled_from(["forward", "backward"]),
        st.integers(1, 320),
        st.integers(1, 600) | st.sampled_from([1, 8, 9, 64, 4096]),
        st.sampled_from([2, 4]),
    )


def owned_units(chosen):
    """How often a unit is computed, over all CTAs of a tile, and where within a CTA each is, as ``Item`` in recurrent.cuh has it."""
    number = np.arange(chosen.unit_blocks * chosen.batch_blocks * 64)
    lane, half = number % 32, number // 32 % 2
    block, unit_block = number // 64 % chosen.batch_blocks, number // 64 // chosen.batch_blocks
    unit = unit_block * BLOCK_UNITS + half * 8 + lane // 4
    entry = block * BLOCK_BATCH + lane % 4 * 2
    # An item is two entries.
    return np.concatenate([unit, unit]), np.concatenate([entry, entry + 1])


def check_plan(chosen, capacity):
    problem = chosen.problem
    rows, items = chosen.unit_blocks * problem.gates, chosen.unit_blocks * chosen.batch_blocks * 64
    threads, fragment = 32 * WARPS, 1024
    # All CTAs run at once, one on a multiprocessor.
    assert 1 <= chosen.grid <= capacity.multiprocessors
    # What the kernels address behind each other in shared memory.
    weights = WARPS * chosen.shared * rows * fragment
    partial = WARPS * rows * chosen.batch_blocks * 64 * 8
    states = chosen.passes * 2 * -(-items // threads) * threads * 8
    assert chosen.shared_memory == weights + partial + states <= capacity.shared_memory
    # Weights cover the length, and are in one place each.
    numbers = WARPS * 4 * (16 // problem.itemsize)
    assert min(chosen.kept, chosen.shared, chosen.streamed) >= 0
    assert (chosen.pieces - 1) * numbers < problem.length <= chosen.pieces * numbers
    assert 1 <= chosen.ahead <= chosen.pieces
    assert chosen.kept * rows * 8 + 4 * chosen.batch_blocks * rows < 255
    # Every pair of a unit and an entry of the batch has one owner.
    units, entries = owned_units(chosen)
    tall, wide = chosen.unit_blocks * BLOCK_UNITS, chosen.batch_blocks * BLOCK_BATCH
    assert len(set(zip(units.tolist(), entries.tolist(), strict=True))) == tall * wide == 2 * items
    assert (units.min(), units.max(), entries.min(), entries.max()) == (0, tall - 1, 0, wide - 1)
    ctas = np.arange(chosen.grid)
    group, tile = ctas % chosen.groups, ctas // chosen.groups
    first_units = np.unique(group) * tall
    begins = ((np.unique(tile) * chosen.passes)[:, None] + np.arange(chosen.passes)).ravel() * wide
    unit_owners = np.bincount((first_units[:, None] + np.arange(tall)).ravel())
    entry_owners = np.bincount((begins[:, None] + np.arange(wide)).ravel())
    assert len(unit_owners) >= problem.hidden
    assert len(entry_owners) >= problem.batch
    assert (unit_owners == 1).all()
    assert (entry_owners == 1).all()
    assert len({*zip(group.tolist(), tile.tolist(), strict=True)}) == chosen.groups * chosen.tiles
    # No CTA has nothing but padding: others would wait for it at no use.
    assert first_units.max() < problem.hidden
    assert (chosen.tiles - 1) * chosen.passes * wide < problem.batch


def planned(problem, capacity, **asked):
    """None where no division fits, which is only where a chip does not hold the states, or sums of one unit block too many."""
    try:
        return plan(problem, capacity, **asked)
    except UnsupportedError:
        # What even tiles of half the size would need.
        states = problem.hidden * problem.batch * 8
        sums = WARPS * problem.gates * 512 * -(-problem.hidden // BLOCK_UNITS)
        assert 4 * (states + sums) > capacity.multiprocessors * capacity.shared_memory
        return None


@pytest.mark.parametrize("chip", NVIDIA)
@given(problems(), st.none() | st.integers(1, 256), st.none() | st.integers(1, 64))
@tries(200, short=20)
def test_every_chip_holds_all_programs_of_a_plan(chip, problem, units, entries):
    capacity = call.capacity(describe(chip))
    if (chosen := planned(problem, capacity, units=units, entries=entries)) is not None:
        check_plan(chosen, capacity)


@given(problems(), st.integers(1, 160), st.integers(99, 227))
@tries(400, short=40)
def test_plans_for_any_part_of_a_chip(problem, multiprocessors, kib):
    capacity = Capacity(multiprocessors, kib * 1024)
    if (chosen := planned(problem, capacity)) is not None:
        check_plan(chosen, capacity)


@pytest.mark.parametrize("size", [100, 1024, 3000])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_parameters_are_those_of_the_plan(direction, size):
    shapes = {
        "inputs": jax.ShapeDtypeStruct((48, 10, size), jnp.bfloat16),
        "weights": {"weight_hh": jax.ShapeDtypeStruct((1, 4 * size, size), jnp.bfloat16)},
    }
    spec = kernel_spec("lstm")
    made = {"forward": FwdParams, "backward": BwdParams}[direction]
    own = kernel.CudaRecurrent
    for chip in NVIDIA:
        device = describe(chip)
        proposed = own.space(shapes, spec, device, direction)
        assert 0 < len(proposed) <= 6
        for params in (own.defaults(shapes, spec, device, direction), *proposed, made(blocksize_m=7, blocksize_n=1)):
            used = own.effective(shapes, spec, params, device, direction)
            assert own.effective(shapes, spec, used, device, direction) == used
            assert used.blocksize_m in (8, 16, 32)
            assert used.blocksize_n in (16, 32, 64, 128, 256)


def kernel_spec(cell, activation="tanh", directions=(False,)):
    from ejkernel.ops.recurrent import RecurrentSpec

    return RecurrentSpec(cell, activation, directions)


@pytest.mark.parametrize(("chip", "batch", "size"), [("nvidia-l4", 4, 8192), (H200, 4096, 1024)])
def test_what_a_chip_does_not_hold_is_left_to_others(compilers, chip, batch, size):
    compilers()
    arrays = {
        "inputs": jax.ShapeDtypeStruct((batch, 8, 16), jnp.bfloat16),
        "weights": {
            "weight_ih": jax.ShapeDtypeStruct((4 * size, 16), jnp.bfloat16),
            "weight_hh": jax.ShapeDtypeStruct((4 * size, size), jnp.bfloat16),
        },
    }
    explanation = explain(recurrent, **arrays, device=chip)
    assert explanation.chosen.platform is next_best()
    with pytest.raises(UnsupportedError, match=f"do not hold a hidden size of {size} with a batch of {batch} at once"):
        explain(recurrent, **arrays, device=chip, platform="cuda")


# --- packed weights --------------------------------------------------------------------------------------------------------


def tensor_core(a, b, each):
    """``mma.sync`` of a row-major 16 × K and a column-major K × 8 fragment, both as lanes hold them: PTX, "mma.m16n8k16" and k8.

    ``a`` is ``[..., lane, 4 registers, numbers]``, ``b`` ``[..., lane, 2 registers, numbers]``; the result is ``[..., 16, 8]``.
    """
    lane = np.arange(32)
    of_a = np.zeros((*a.shape[:-3], 16, 8 * each))
    of_b = np.zeros((*b.shape[:-3], 8 * each, 8))
    for number in range(each):
        for register in range(4):
            k = lane % 4 * each + number + register // 2 * 4 * each
            of_a[..., lane // 4 + register % 2 * 8, k] = a[..., lane, register, number]
        for register in range(2):
            of_b[..., lane % 4 * each + number + register * 4 * each, lane // 4] = b[..., lane, register, number]
    return of_a @ of_b


def product(weights, rows, chosen):
    """What ``multiply`` in recurrent.cuh adds up for a batch block of 8: ``[groups, unit blocks, gates, 16, 8]``."""
    problem = chosen.problem
    each = 4 // problem.itemsize
    chunk, piece_size, lane = 4 * each, 16 * each, np.arange(32)
    flat = np.asarray(packed(weights, chosen)).astype(np.float64).reshape(-1, 4, each)  # uint4s
    sums = np.zeros((chosen.groups, chosen.unit_blocks, problem.gates, 16, 8))
    row_blocks = chosen.unit_blocks * problem.gates
    for group in range(chosen.groups):
        for warp in range(WARPS):
            own = (group * WARPS + warp) * chosen.pieces * row_blocks * 64
            for piece in range(chosen.pieces):
                # Rows::load: 16 bytes of an entry of the batch; past the length zeros.
                at = (piece * WARPS + warp) * piece_size + lane % 4 * chunk
                padded = np.concatenate([rows, np.zeros((8, WARPS * chosen.pieces * piece_size))], axis=1)
                row = padded[(lane // 4)[:, None], at[:, None] + np.arange(chunk)].reshape(32, 4, each)
                for unit_block in range(chosen.unit_blocks):
                    for gate in range(problem.gates):
                        r = unit_block * problem.gates + gate
                        for which in range(2):
                            a = flat[own + ((piece * row_blocks + r) * 2 + which) * 32 + lane]
                            b = row[:, 2 * which : 2 * which + 2]
                            sums[group, unit_block, gate] += tensor_core(a, b, each)
    return sums


PACKED = [
    ("lstm", "forward", 40, "float32"),
    ("gru", "forward", 136, "bfloat16"),
    ("lstm", "backward", 24, "bfloat16"),
    ("rnn", "backward", 72, "float32"),
]


@pytest.mark.parametrize(("cell", "direction", "size", "dtype"), PACKED)
@pytest.mark.parametrize("units", [16, 32])
def test_packed_weights_give_the_product(cell, direction, size, dtype, units):
    """As the tensor cores would, from where lanes read them; small integers, so that every sum is exact."""
    problem = kernel._problem(cell, direction, size, 8, dtype_size(dtype))
    chosen = plan(problem, Capacity(132, 227 * 1024), units=units)
    assert chosen.unit_blocks == units // BLOCK_UNITS
    rng = np.random.default_rng(0)
    weights = rng.integers(-9, 10, (problem.gates, problem.hidden, problem.length))
    rows = rng.integers(-9, 10, (8, problem.length))
    found = product(jnp.asarray(weights, dtype), rows, chosen)
    # To [gates, units, entries].
    found = found.transpose(2, 0, 1, 3, 4).reshape(problem.gates, -1, 8)
    np.testing.assert_array_equal(found[:, : problem.hidden], weights @ rows.T)
    assert not found[:, problem.hidden :].any()


@pytest.mark.parametrize(("cell", "direction", "size", "dtype"), PACKED)
def test_each_weight_is_packed_once(cell, direction, size, dtype):
    problem = kernel._problem(cell, direction, size, 8, dtype_size(dtype))
    chosen = plan(problem, Capacity(132, 227 * 1024))
    count = problem.gates * problem.hidden * problem.length
    # The dtype's numbers need not be exact: their order is asked for.
    weights = jnp.arange(1, count + 1, dtype=jnp.float32).reshape(problem.gates, problem.hidden, problem.length)
    found = np.asarray(packed(weights, chosen))
    assert found.size == chosen.groups * WARPS * chosen.pieces * chosen.unit_blocks * problem.gates * 256 * (
        4 // problem.itemsize
    )
    np.testing.assert_array_equal(np.sort(found[found != 0]), np.arange(1, count + 1))


def test_nans_keep_the_host_s_bits():
    """The kernels round float32 in integers: of the hardware's NaN, all of whose bits are set, that would make zeros."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00001, 0x3F800000], np.uint32)
    kept_bits = np.asarray(recurrent_plan.host_nans(jnp.asarray(bits.view(np.float32)))).view(np.uint32)
    rounded = ((kept_bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    np.testing.assert_array_equal(np.isnan(rounded), [True] * 4 + [False])


# --- what a call becomes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """Launches as they are asked for, instead of compilers and a registration."""
    made = []

    def cubin(source, architecture, macros):
        made.append({"source": source, "architecture": architecture, "macros": dict(macros)})
        return b"machine code"

    monkeypatch.setattr(build, "cubin", cubin)
    monkeypatch.setattr(call, "_register", lambda: None)
    return made


@pytest.mark.parametrize(
    ("cell", "lengths", "both"), [("lstm", True, False), ("gru", False, True), ("rnn", True, False)]
)
def test_a_call_is_one_launch_for_each_direction(recorded, compilers, cell, lengths, both):
    pytest.importorskip("jax_cuda13_plugin", reason="jax-cuda13-plugin lowers for GPUs, and is not installed")
    compilers()
    size = 20  # which is padded
    names = [name + suffix for suffix in ("", "_reverse")[: 1 + both] for name in ("weight_ih", "weight_hh")]
    weights = {name: jnp.zeros((GATES[cell] * size, 6 if "ih" in name else size)) for name in names}
    more = {"lengths": jnp.array([3, 0])} if lengths else {}

    def run(x, weights):
        out, pull = jax.vjp(
            lambda x, w: recurrent(x, None, w, cell, bidirectional=both, platform="cuda", **more)[0], x, weights
        )
        return out, pull(out)

    with target(H200):
        text = jax.jit(run).trace(jnp.ones((2, 5, 6)), weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{call.TARGET}(") == 2 * (1 + both)
    assert text.count("cooperative = 1 : i32") == 2 * (1 + both)
    assert {made["architecture"] for made in recorded} == {"sm_90a"}
    for made in recorded:
        # Every macro that a source reads without a default is there.
        text = (toolchain.SOURCES / made["source"]).read_text() + (toolchain.SOURCES / "recurrent.cuh").read_text()
        used = {name for name in ("HIDDEN", "GATES", "PLANES", "CELL", "KEPT", "SHARED", "AHEAD") if name in text}
        assert used <= {*made["macros"]}
        assert made["macros"]["HIDDEN"] == 24
