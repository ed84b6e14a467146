"""Memory that a step frees is reused by the next step, and trimmed memory is returned to the kernel."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from paceline.runtime.memory import keep_freed_memory, return_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def own_mb():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) // 1024
def step():  # twelve times a step's activations: freed in the order of a backward pass
    kept = [torch.ones(size, 1 << 18) for size in range(1, 13)]
    while kept:
        kept.pop()
def faults_of_steps():
    step()
    before = faults()
    for _ in range(10):
        step()
    return (faults() - before) // 10
usual = faults_of_steps()
keep_freed_memory()
kept = faults_of_steps()
before = own_mb()
return_freed_memory()
print(usual, kept, before - own_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own ways")
def test_steps_after_the_first_need_no_new_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept, returned_mb = map(int, re.findall(r"-?\d+", done.stdout))
    assert usual > 1000  # otherwise the next line would prove nothing
    assert kept < 50
    assert returned_mb > 50
