"""What the CUDA platform builds and keeps, by which compilers, and what it says when they fail."""

import json
import os
import shutil
import subprocess
import sys
import threading

import filelock
import pytest
from cuda_compilers import forget, needs

from ejkernel.kernels._cuda import build, call, toolchain
from ejkernel.kernels._cuda.toolchain import BuildError

slow = pytest.mark.slow


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
