"""Memory that is handed back to the kernel, and what a process is told to have it in huge pages."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.config.schema import Config
from lightrl.engine.base import EngineSpec
from lightrl.engine.start import engine_environment
from lightrl.system.process import huge_pages
from lightrl.trainer.rank_processes import rank_environment

HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_what_the_user_has_set_stays():
    def added(text):
        return huge_pages({"GLIBC_TUNABLES": text})

    assert huge_pages({}) == added("") == HUGE
    other = "glibc.malloc.arena_max=2"
    assert added(other) == {"GLIBC_TUNABLES": f"{other}:glibc.malloc.hugetlb=1"}
    assert added(f"{other}:glibc.malloc.hugetlb=0") == {}


@pytest.mark.parametrize("placement", ["shared", "own"])
def test_only_who_gives_its_memory_back_has_huge_pages(placement):
    sections = {"model": {"path": "m"}, "data": {"path": "d"}}
    config = Config.model_validate({**sections, "rollout": {"placement": placement}})
    is_shared = placement == "shared"
    spec = EngineSpec("torch", "m", "float32", 64, 4, can_sleep=is_shared)
    for found in (rank_environment(config, (), {}), engine_environment(spec, 1, {})):
        assert ("GLIBC_TUNABLES" in found) == is_shared
        assert found["OMP_NUM_THREADS"] == "1"


ASKS = """
import ctypes, re
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for size, count in ((64 << 10, 100), (64 << 20, 1)):  # of the heap, and a mapping of its own
    address = [libc.malloc(size) for _ in range(count)][-1] + size // 2
    for line in open("/proc/self/smaps"):
        if place := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(place[1], 16) <= address < int(place[2], 16)
        elif line.startswith("VmFlags:") and is_here:
            print("hg" in line.split())
"""


def test_a_process_that_is_told_so_asks_the_kernel_for_huge_pages():
    state = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        pytest.skip("an allocator that cannot")
    if not state.exists() or "[madvise]" not in state.read_text():
        pytest.skip("a kernel that gives them to all, or to nobody")

    def asks(environment):
        words = [sys.executable, "-I", "-S", "-c", ASKS]
        return subprocess.check_output(words, env=environment, text=True).split()

    told = huge_pages({})
    assert (asks({}), asks(told)) == (["False"] * 2, ["True"] * 2)
