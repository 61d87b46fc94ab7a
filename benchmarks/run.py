"""Runs every benchmark side by side with what it is compared to, and writes RESULTS.md.

python benchmarks/run.py                             all of them
python benchmarks/run.py learner real.sampling       one, and a part of one
"""

import argparse
import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
SUITES = (
    "collect",
    "store",
    "gateway",
    "sampling",
    "gpu",
    "preferences",
    "learner",
    "never_wait",
    "staleness",
    "control_plane",
    "doctor",
    "view",
    "real",
)
MARK = "<!-- {} -->"


def hardware() -> str:
    """The machine in a line: processor, cores, and the GPU if there is one."""
    import torch

    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    processor = names[0] if names else platform.processor()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{processor}, {os.cpu_count()} cores{gpu}; torch {torch.__version__}, Python {platform.python_version()}"


def replace_section(text: str, name: str, section: str) -> str:
    """`text` with the section called `name` replaced, or added at the end."""
    begin, end = MARK.format(name), MARK.format(f"end of {name}")
    body = f"{begin}\n{section.strip()}\n{end}\n"
    if begin not in text:
        return f"{text.rstrip()}\n\n{body}"
    head, _, rest = text.partition(begin)
    return head + body + rest.partition(end)[2].lstrip("\n")


def sections(name: str, seeds: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """The sections of a suite, each with what measures it: one, or one for each of its `PARTS`."""
    suite, _, part = name.partition(".")
    module = importlib.import_module(suite)
    parts = getattr(module, "PARTS", {})
    if not parts:
        yield suite, module.report
    for each in [part] if part else parts:
        yield f"{suite}.{each}", functools.partial(parts[each], seeds)


def main(suites: list[str], seeds: int) -> None:
    sys.path.insert(0, str(HERE))
    text = (
        RESULTS.read_text()
        if RESULTS.exists()
        else "# Benchmarks\n\nWritten by `make bench`; ratios are taken within one run.\n"
    )
    for suite in suites or SUITES:
        for name, measure in sections(suite, seeds):
            print(f"== {name}", flush=True)
            report = measure()
            print(report, flush=True)
            section = f"{report.strip()}\n\nMeasured {datetime.now(UTC):%Y-%m-%d} on {hardware()}.\n"
            text = replace_section(text, name, section)
            RESULTS.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; a part: real.PART, gpu.PART")
    parser.add_argument("--seeds", type=int, default=1, help="runs of real.score")
    arguments = parser.parse_args()
    main(arguments.suites, arguments.seeds)
