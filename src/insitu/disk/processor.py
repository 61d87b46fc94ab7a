"""The processor of this machine, and the dtype that suits it."""

from collections.abc import Collection
from pathlib import Path

BFLOAT16_ABOVE, BFLOAT16_FLAG = 100_000_000, "amx_bf16"
"""Parameters above which frozen weights are loaded in bfloat16 on a CPU with this flag: it is faster then. With
`avx512_bf16` alone, bfloat16 is slower than float32: 5 s and 3 s for a job of SmolLM2-135M, LoRA of rank 16."""


def processor_words(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The maker and the flags, among other words, by the names of Linux; none elsewhere."""
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def cpu_dtype(words: Collection[str], frozen_parameters: int) -> str:
    """The dtype of a model on a processor if none is asked for; the same on each with these flags."""
    return "bfloat16" if frozen_parameters > BFLOAT16_ABOVE and BFLOAT16_FLAG in words else "float32"
