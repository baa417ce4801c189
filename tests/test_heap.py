"""What a step frees is kept for the next one; in a process of its own, since it changes the whole process."""

import os
import subprocess
import sys

import pytest

# Frees and takes 40 MiB in a few large blocks, as the steps of a CPU model do; prints the page faults a time.
PROGRAM = """
import ctypes, resource, sys
from raytrainer.heap import keep_freed_memory
kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(10 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 10 * 2**20)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def faults(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        check=True,
        text=True,
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
class TestKeepFreedMemory:
    def test_a_step_takes_its_memory_from_the_one_before(self):
        kept, count = faults()
        assert kept
        assert count < 100  # 10,240 pages of 4 KiB otherwise

    def test_a_setting_of_the_users_is_left_alone(self):
        kept, count = faults(MALLOC_MMAP_THRESHOLD_="131072")
        assert not kept
        assert count > 1000
