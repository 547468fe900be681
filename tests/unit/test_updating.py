"""Updating llama.cpp: the version is in one place, and tools/compare_llama_cpp.py finds what changed."""

import os
import re
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEADER = """
#ifndef LLAMA_H
#define LLAMA_H  // a guard
#define LLAMA_DEFAULT_SEED 0xFFFFFFFF
#define LLAMA_OTHER_SEED 1
#ifdef __cplusplus
extern "C" {
#endif
    // The types of files; { "not": a block };
    enum llama_ftype {
        LLAMA_FTYPE_ALL_F32     = 0,
        LLAMA_FTYPE_MOSTLY_F16  = 1 << 0, /* except 1d tensors */
        LLAMA_FTYPE_MOSTLY_Q8_0,
    };
    enum ggml_unused { GGML_UNUSED_A, GGML_UNUSED_B };
    struct llama_model;
    typedef bool (*llama_progress_callback)(float progress, void * user_data);
    struct llama_model_params {
        int32_t n_gpu_layers; // number of layers
        llama_progress_callback progress_callback;
        enum llama_ftype ftype;
    };
    LLAMA_API struct llama_model_params llama_model_default_params(void);
    DEPRECATED(LLAMA_API int32_t llama_n_layer(const struct llama_model * model), "use another (now)");
    LLAMA_API int32_t llama_decode(
              struct llama_model * model,
                         int32_t   n);
    LLAMA_API void llama_unused(int n);
#ifdef __cplusplus
}
#endif
#endif
"""
INTERNAL = """
namespace ggml::cpu {
class tensor_traits {
  public:
    virtual ~tensor_traits();
    virtual bool work_size(int n_threads, const struct ggml_tensor * op, size_t & size) = 0;
};
}  // namespace
struct ggml_hidden { int a; };
void ggml_barrier(struct ggml_threadpool * tp);
inline int ggml_helper(int n) { if (n) { return 1; } return 0; }
"""
BINDINGS = """
LLAMA_DEFAULT_SEED = 0xFFFFFFFF
LLAMA_FTYPE_MOSTLY_F16 = 1
LLAMA_FTYPE_MOSTLY_Q8_0 = 1 << 1

class llama_model_params(ctypes.Structure):
    _fields_ = [
        ("n_gpu_layers", ctypes.c_int32),  # number of layers
        ("progress_callback", llama_progress_callback),
        ("ftype", ctypes.c_int),
    ]

@ctypes_function("llama_model_default_params", [], llama_model_params)
def llama_model_default_params(): ...

@ctypes_function("llama_decode", [llama_model_p, ctypes.c_int32], ctypes.c_int32)
def llama_decode(model, n, /):
    "Decode."

class Llama:
    def generate(self, tokens, top_k=40): ...
    def unused(self): ...
"""
NAMES = """
static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {
    { LLM_ARCH_GEMMA4_ASSISTANT, "gemma4-assistant" },
    { LLM_KV_BLOCK_COUNT,        "%s.block_count" },
    { LLM_KV_UNUSED,             "%s.unused" },
    { LLM_TENSOR_ATTN_Q,         "blk.%d.attn_q" },
    { LLM_TENSOR_ATTN_K,         "blk.%d.attn_k" },
};
"""
OURS = {
    "spec_local/llama/model.py": """
from llama_cpp import llama_cpp
params = llama_cpp.llama_model_default_params()
n = llama_cpp.llama_decode(model, number("block_count"), llama_cpp.LLAMA_DEFAULT_SEED)
kind = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
names = ["gemma4-assistant", f"blk.{i}.attn_q.weight", f"{i}.{name}"]

class Llama(llama_cpp.Llama):
    def generate(self): ...
""",
    "spec_local/kernels/ggml_internals.h": """
#define SPECDEC_GGML_VERSION "0.1.2"
#define SPECDEC_GGML_COMMIT "abcdef0"
namespace ggml::cpu { class tensor_traits { virtual ~tensor_traits(); }; }
void ggml_barrier(ggml_threadpool *);
""",
    "spec_local/kernels/plugin.cpp": "// uses no ggml_hidden\nint main() { ggml_barrier(p); }\n",
}
VENDOR = "vendor/llama.cpp"
THEIRS = {
    f"{VENDOR}/include/llama.h": HEADER,
    f"{VENDOR}/ggml/src/ggml-cpu/traits.h": INTERNAL,
    f"{VENDOR}/src/llama-arch.cpp": NAMES,
    f"{VENDOR}/src/CMakeLists.txt": "set_target_properties(llama PROPERTIES\n VERSION 0.1\n SOVERSION 0\n)",
    f"{VENDOR}/ggml/CMakeLists.txt": "set(GGML_VERSION_MAJOR 0)\nset(GGML_VERSION_MINOR 1)\n"
    "set(GGML_VERSION_PATCH 2)\n",
    f"{VENDOR}/ggml/src/CMakeLists.txt": "set_target_properties(ggml-base PROPERTIES\n    "
    "VERSION ${GGML_VERSION}\n    SOVERSION ${GGML_VERSION_MAJOR}\n)\n",
    "llama_cpp/llama_cpp.py": BINDINGS,
    "llama_cpp/__init__.py": '__version__ = "1.2.3"\n',
    ".git/modules/vendor/llama.cpp/HEAD": "abcdef0123456789\n",
}


@pytest.fixture(scope="module")
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import compare_llama_cpp

        yield compare_llama_cpp
        for name in ("compare_llama_cpp", "declarations"):
            sys.modules.pop(name, None)


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def run(compare, tmp_path, monkeypatch, capsys):
    """Compare the made-up version with one in which a text of a file is replaced."""
    monkeypatch.setattr(compare, "ROOT", written(tmp_path / "ours", OURS))
    old = written(tmp_path / "old", THEIRS)

    def run(file="llama.h", before="", after=""):
        name = next(name for name in THEIRS if name.endswith(file))
        assert before in THEIRS[name]
        changed = THEIRS[name].replace(before, after) if before else THEIRS[name]
        code = compare.main([str(old), str(written(tmp_path / "new", THEIRS | {name: changed}))])
        head, *lines, last = capsys.readouterr().out.splitlines()
        assert head.startswith("llama-cpp-python 1.2.3 -> ")
        assert last == f"{sum(not line.startswith('to do') for line in lines)} changes of what specdec uses"
        return code, lines

    return run


def test_nothing_changed(run):
    assert run() == (0, [])


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("llama.h", "// number of layers", "/* layers; { */"),
        ("llama.h", "struct llama_model * model,\n", "struct llama_model* model,"),
        ("llama.h", "const struct llama_model * model", "const llama_model *model"),
        ("llama.h", "void llama_unused(int n)", "void llama_unused(long n)"),
        ("llama.h", "LLAMA_OTHER_SEED 1", "LLAMA_OTHER_SEED 2"),
        ("llama.h", "GGML_UNUSED_A,", "GGML_UNUSED_NEW, GGML_UNUSED_A,"),
        ("llama.h", "1 << 0", "0x1u"),
        ("traits.h", "struct ggml_hidden { int a; }", "struct ggml_hidden { long a; }"),
        ("traits.h", "return 1;", "return 2;"),
        ("llama_cpp.py", "def unused(self)", "def unused(self, n)"),
        ("llama_cpp.py", "  # number of layers", ""),
        ("llama-arch.cpp", "%s.unused", "%s.renamed"),
        ("llama-arch.cpp", "blk.%d.attn_k", "blk.%d.k"),
        ("llama-arch.cpp", "LLM_KV_BLOCK_COUNT", "LLM_KV_N_BLOCKS"),
    ],
)
def test_what_is_not_used_or_says_the_same_is_no_change(run, file, before, after):
    assert run(file, before, after) == (0, [])


@pytest.mark.parametrize(
    ("file", "before", "after", "lines"),
    [
        (
            "llama.h",
            "int32_t n_gpu_layers;",
            "int32_t n_gpu_layers; void (*log)(int, bool);",
            [
                "include/llama.h: struct llama_model_params: nothing -> void (*log)(int, bool)",
                "llama_cpp/llama_cpp.py: class llama_model_params: not as in include/llama.h: nothing -> log",
            ],
        ),
        (
            "llama.h",
            "LLAMA_FTYPE_MOSTLY_F16 ",
            "LLAMA_FTYPE_ALL_F64, LLAMA_FTYPE_MOSTLY_F16 ",
            ["include/llama.h: enum llama_ftype: nothing -> LLAMA_FTYPE_ALL_F64 = 1"],
        ),
        (
            "llama.h",
            "LLAMA_FTYPE_MOSTLY_Q8_0",
            "LLAMA_FTYPE_ALL_F64, LLAMA_FTYPE_MOSTLY_Q8_0",
            [
                "include/llama.h: enum llama_ftype: nothing -> LLAMA_FTYPE_ALL_F64 = 2",
                "include/llama.h: enum llama_ftype: 1 values changed, LLAMA_FTYPE_MOSTLY_Q8_0 2 -> 3",
                "llama_cpp/llama_cpp.py: LLAMA_FTYPE_MOSTLY_Q8_0 = 1 << 1: not as in llama.cpp: 3",
            ],
        ),
        (
            "llama.h",
            "        LLAMA_FTYPE_MOSTLY_Q8_0,\n",
            "",
            ["include/llama.h: enum llama_ftype: LLAMA_FTYPE_MOSTLY_Q8_0 = 2 -> nothing"],
        ),
        (
            "llama.h",
            "                         int32_t   n)",
            "int64_t n)",
            [
                "include/llama.h: int32_t llama_decode(llama_model *model, int32_t n) -> "
                "int32_t llama_decode(llama_model *model, int64_t n)"
            ],
        ),
        (
            "llama.h",
            "float progress",
            "double progress",
            [
                "include/llama.h: "
                "typedef bool (*llama_progress_callback)(float progress, void *user_data) -> "
                "typedef bool (*llama_progress_callback)(double progress, void *user_data)"
            ],
        ),
        (
            "llama.h",
            "0xFFFFFFFF",
            "7",
            ["include/llama.h: #define LLAMA_DEFAULT_SEED 0xFFFFFFFF -> #define LLAMA_DEFAULT_SEED 7"],
        ),
        (
            "llama.h",
            "LLAMA_API struct llama_model_params llama_model_default_params(void);",
            "",
            ["include/llama.h: llama_model_params llama_model_default_params(void): removed"],
        ),
        (
            "traits.h",
            "virtual ~tensor_traits();",
            "",
            [
                "ggml/src/ggml-cpu/traits.h: class tensor_traits: virtual ~tensor_traits() -> nothing",
            ],
        ),
        (
            "traits.h",
            "void ggml_barrier(struct ggml_threadpool * tp)",
            "int ggml_barrier(struct ggml_threadpool * tp)",
            [
                "ggml/src/ggml-cpu/traits.h: void ggml_barrier(ggml_threadpool *tp) -> "
                "int ggml_barrier(ggml_threadpool *tp)"
            ],
        ),
        (
            "llama_cpp.py",
            '"llama_decode", [llama_model_p, ctypes.c_int32]',
            '"llama_decode", [llama_model_p, ctypes.c_int64]',
            [
                "llama_cpp/llama_cpp.py: llama_decode: [llama_model_p, ctypes.c_int32] -> ctypes.c_int32 -> "
                "llama_decode: [llama_model_p, ctypes.c_int64] -> ctypes.c_int32"
            ],
        ),
        (
            "llama_cpp.py",
            "top_k=40",
            "top_k=20",
            [
                "llama_cpp/llama_cpp.py: class Llama: def generate(self, tokens, top_k=40) -> "
                "class Llama: def generate(self, tokens, top_k=20)"
            ],
        ),
        (
            "llama-arch.cpp",
            "blk.%d.attn_q",
            "blk.%d.q",
            ['src/llama-arch.cpp: "blk.%d.attn_q": removed'],
        ),
        (
            "llama.cpp/src/CMakeLists.txt",
            "SOVERSION 0",
            "SOVERSION 1",
            ["src/CMakeLists.txt: libllama.so.0 -> libllama.so.1"],
        ),
        (
            "ggml/CMakeLists.txt",
            "MAJOR 0",
            "MAJOR 1",
            [
                "to do: spec_local/kernels/ggml_internals.h: "
                '#define SPECDEC_GGML_VERSION "1.1.2", not "0.1.2"',
                "ggml/src/CMakeLists.txt: libggml-base.so.0 -> libggml-base.so.1",
            ],
        ),
    ],
)
def test_changes_of_what_is_used(run, file, before, after, lines):
    assert run(file, before, after) == (1, lines)


def test_the_kernels_must_be_told_the_commit(run):
    todo = 'to do: spec_local/kernels/ggml_internals.h: #define SPECDEC_GGML_COMMIT "9876543", not "abcdef0"'
    assert run("HEAD", "abcdef0123456789", "9876543210") == (0, [todo])


def test_an_archive_is_read_as_a_folder(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "ROOT", written(tmp_path / "ours", OURS))
    folder = written(tmp_path / "llama_cpp_python-1.2.3", THEIRS)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    assert compare.main([str(folder), str(tmp_path / "a.tar.gz")]) == 0
    assert "llama.cpp abcdef012 -> abcdef012, ggml 0.1.2 -> 0.1.2" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line(compare, tmp_path, capsys):
    file = tmp_path / "a.tar.gz"
    file.write_text("no archive")
    for given in (tmp_path, file):
        assert compare.main([str(given), str(given)]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"compare_llama_cpp: {given}: ")
        assert line.count("\n") == 1


MAKE = """#!/bin/sh
# Makes an environment if the version in pyproject.toml and in the lock file is the new one.
grep -q '"llama-cpp-python==1.2.3"' pyproject.toml || exit 1
grep -qx 'llama-cpp-python==1.2.3' requirements-dev.txt || exit 1
mkdir -p .venv/bin
printf '%s\\n' '#!/bin/sh' 'exit 0' > .venv/bin/specdec
printf '%s\\n' '#!/bin/sh' 'case "$*" in *tests/llama*)' \
    '  echo "FAILED tests/llama/test_a.py::test_b - no"; echo "1 failed, 2 passed in 3s"; exit 1;;' \
    '*) echo "8 passed in 1s";; esac' > .venv/bin/python
chmod +x .venv/bin/*
"""


@pytest.mark.parametrize("broken", [False, True])
def test_the_tests_run_in_a_copy_with_the_new_version(compare, tmp_path, monkeypatch, capfd, broken):
    pins = {
        "pyproject.toml": 'dependencies = [\n    "llama-cpp-python==1.2.2",\n]\n',
        "requirements-dev.txt": "jinja2==3.1.6\nllama-cpp-python==1.2.2\n",
    }
    root = written(tmp_path / "ours", OURS | pins)
    monkeypatch.setattr(compare, "ROOT", root)
    written(tmp_path / "bin", {"make": "#!/bin/sh\nexit 2\n" if broken else MAKE})
    (tmp_path / "bin" / "make").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    folder = str(written(tmp_path / "new", THEIRS))
    assert compare.main([folder, folder, "--test"]) == 1
    lines = capfd.readouterr().out.splitlines()
    if broken:
        assert lines[-1] == "failed: make .venv/bin/python"
    else:
        assert lines[-4:] == [
            "tests/unit: 8 passed in 1s",
            "tests/llama: 1 failed, 2 passed in 3s",
            "FAILED tests/llama/test_a.py::test_b - no",
            "tests/cli: 8 passed in 1s",
        ]
    assert (root / "pyproject.toml").read_text() == pins["pyproject.toml"]


def test_what_our_sources_use_is_found(compare):
    used = compare.use(ROOT)
    assert {"llama_decode", "llama_get_embeddings_nextn", "GGML_OP_MUL_MAT_ID"} <= used.words
    assert {"llama_model_target_layer_ids", "llama_vocab_fim_"} <= used.prefixes
    assert {"ggml_compute_params", "ggml_backend_buffer_i", "tensor_traits"} <= used.defined
    assert {"nextn_predict_layers", r"general\.architecture"} <= used.literals


# ---- one place ----

RECORDS = {"spec_local/shipped/README.md", "requirements-dev.txt"}
"""What was measured with some version, and stays as it is, and what is made from pyproject.toml."""


def test_no_other_file_repeats_the_version():
    """docs/ may say with which version something was measured."""
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    pin = next(p.partition("==")[2] for p in pins if p.startswith("llama-cpp-python=="))
    header = (ROOT / "spec_local/kernels/ggml_internals.h").read_text(encoding="utf-8")
    ggml, commit = re.findall(r'#define SPECDEC_GGML_\w+ "(.*)"', header)
    places = {pin: "pyproject.toml", ggml: "spec_local/kernels/ggml_internals.h"}
    places[commit] = places[ggml]
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(v)}(?![\w.])" for v in places).encode())
    folders = ("spec_local", "cli", "tests", "tools", "benchmarks", "examples", "plugins")
    files = [f for name in folders for f in (ROOT / name).rglob("*") if "__pycache__" not in f.parts]
    repeated = []
    for file in [*files, *(f for f in ROOT.iterdir() if f.name != ".git")]:
        if file.is_file() and (name := file.relative_to(ROOT).as_posix()) not in RECORDS:
            found = {version.decode() for version in pattern.findall(file.read_bytes())}
            repeated += [f"{name}: {version}" for version in found if places[version] != name]
    assert not repeated


def test_the_requirement_is_that_of_the_metadata(monkeypatch):
    from spec_local.llama.setup import build

    requirements = ["numpy>=1", "llama-cpp-python==9.8.7; extra"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    assert build._requirement() == "llama-cpp-python==9.8.7"
