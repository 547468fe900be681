"""A kernel library that computes nothing; tests control the results of its installation and self-test."""

import os
import subprocess
from pathlib import Path

# FAKE_<instruction set>: "crash", "refuse", or the error that the self-test returns.
# FAKE_LOG: a file to which each installation appends a line.
# FAKE_SLOW: a type whose products take twice as long as llama.cpp's, those of a floating-point type from
# eight tokens on; or "refuse". All others take half as long.
# FAKE_READING: the way of reading weights with which products take 0.9 of the time.
SOURCE = r"""
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

static const char *wanted;
static int enabled = -1;

extern "C" {
const char *specdec_kernels_install(const char *instruction_set) {
    wanted = std::getenv((std::string("FAKE_") + instruction_set).c_str());
    if (const char *log = std::getenv("FAKE_LOG")) {
        std::FILE *file = std::fopen(log, "a");
        std::fprintf(file, "%s\n", instruction_set);
        std::fclose(file);
    }
    if (wanted && std::string(wanted) == "refuse") return "they do not fit";
    return nullptr;
}
void specdec_kernels_enable(int on) { enabled = on; }
void specdec_kernels_pack_ends(int) {}
long long specdec_kernels_experts_read() { return 0; }
void specdec_kernels_limit(const char *, long long) {}
void specdec_kernels_read_as(int, int) {}
void specdec_kernels_choose_rows(long long, const int *, long long) {}
const char *specdec_kernels_time(const char *type, long long, long long, const int *sizes, int n_sizes, int,
                                 int rounds, int readings, double *seconds) {
    const char *slow = std::getenv("FAKE_SLOW");
    const char *fast = std::getenv("FAKE_READING");
    if (slow && std::string(slow) == "refuse") return "there is not enough memory";
    for (int i = 0; i < rounds * n_sizes; i++) {
        const bool loses = slow && slow == std::string(type) && (type[0] == 'Q' || sizes[i % n_sizes] >= 8);
        seconds[2 * i] = readings || loses ? 2.0 : 0.5, seconds[2 * i + 1] = readings ? 2.0 : 1.0;
        if (readings && fast) seconds[2 * i + std::atoi(fast)] *= 0.9;
    }
    return nullptr;
}
const char *specdec_kernels_self_test() {
    if (wanted && std::string(wanted) == "crash") std::raise(SIGILL);
    return wanted;
}
bool specdec_capture_tensor(void *, bool, void *) { return false; }
int fake_enabled() { return enabled; }
}
"""


def write_source(folder: Path) -> Path:
    """Write sources that the build can use instead of the real ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake.cpp").write_text(SOURCE)
    (folder / "fake.h").touch()
    return folder


def compile_library(folder: Path) -> Path:
    """Compile the fake library without the build."""
    write_source(folder)
    command = ["c++", "-shared", "-fPIC", "-o", "fake.so", "fake.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "fake.so"


def compiler(folder: Path, script: str) -> str:
    """Write a shell script to use as C++ compiler; its arguments are "$@"."""
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)
    return str(path)
