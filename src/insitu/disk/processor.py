"""The processor of this machine, and the dtype that suits it."""

from collections.abc import Collection
from pathlib import Path

_BFLOAT16_ABOVE = 100_000_000
"""Parameters above which frozen weights are loaded in bfloat16 on a processor that multiplies it."""
_MULTIPLIES_BFLOAT16 = {"amx_bf16"}, {"AuthenticAMD", "avx512_bf16"}
"""Words of processors, all of one set, where bfloat16 is faster than float32: 2.2 s and 2.7 s for a job of SmolLM2-135M
with LoRA of rank 16 on AMD's; on Intel's without matrix units it is slower, 5 s and 3 s."""


def processor_words(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The maker and the flags, among other words, by the names of Linux; none elsewhere."""
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def cpu_dtype(words: Collection[str], frozen_parameters: int) -> str:
    """The dtype of a model on a processor if none is asked for; the same on each with these flags."""
    multiplies = any(needed <= set(words) for needed in _MULTIPLIES_BFLOAT16)
    return "bfloat16" if multiplies and frozen_parameters > _BFLOAT16_ABOVE else "float32"
