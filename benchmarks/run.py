"""Runs every benchmark side by side with what it is compared to, and writes RESULTS.md."""

import importlib
import os
import platform
import sys
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
    "control_plane",
    "doctor",
    "view",
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


def main(suites: list[str]) -> None:
    sys.path.insert(0, str(HERE))
    text = (
        RESULTS.read_text()
        if RESULTS.exists()
        else "# Benchmarks\n\nWritten by `make bench`; ratios are taken within one run.\n"
    )
    for name in suites or SUITES:
        print(f"== {name}", flush=True)
        report = importlib.import_module(name).report()
        print(report, flush=True)
        section = f"{report.strip()}\n\nMeasured {datetime.now(UTC):%Y-%m-%d} on {hardware()}.\n"
        text = replace_section(text, name, section)
        RESULTS.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
