"""The processor of this machine, what of it this process can use, and the dtype that suits it."""

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from insitu.disk.memory import CGROUPS, PROC, numbers, own_cgroups

_BFLOAT16_ABOVE = 100_000_000
"""Parameters above which frozen weights are loaded in bfloat16 on a processor that multiplies it."""
_MULTIPLIES_BFLOAT16 = {"amx_bf16"}, {"AuthenticAMD", "avx512_bf16"}
"""Words of processors, all of one set, where bfloat16 is faster than float32: 2.2 s and 2.7 s for a job of SmolLM2-135M
with LoRA of rank 16 on AMD's; on Intel's without matrix units it is slower, 5 s and 3 s."""

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Those of the process, read before torch is loaded: with OMP_PROC_BIND, libgomp then binds this thread to one."""


def processor_words(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The maker and the flags, among other words, by the names of Linux; none elsewhere."""
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """How many threads of this process can run at a time: on its cores, and within the quotas of its cgroups.

    A container with `--cpus 2` sees all cores of its machine, and has the time of two. Version 1 has
    `cpu.cfs_quota_us` and `cpu.cfs_period_us`, version 2 has `cpu.max`.
    """
    return max(1, min([_CORES, *(math.ceil(quota) for quota in _quotas(proc, cgroups))]))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    for folder in own_cgroups("cpu", proc, cgroups):
        quota, period = (numbers(folder / f"cpu.cfs_{name}_us").get("") for name in ("quota", "period"))
        if quota and period:
            yield quota / period
        limits = numbers(folder / "cpu.max")
        yield from (int(name) / period for name, period in limits.items() if name.isdecimal() and period)


def cpu_dtype(words: Collection[str], frozen_parameters: int) -> str:
    """The dtype of a model on a processor if none is asked for; the same on each with these flags."""
    multiplies = any(needed <= set(words) for needed in _MULTIPLIES_BFLOAT16)
    return "bfloat16" if multiplies and frozen_parameters > _BFLOAT16_ABOVE else "float32"
