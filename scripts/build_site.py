"""Builds the documentation as a site in build/site; links to what it lacks are errors.

The pages keep their places in the repository, so that they link to one another as they do there.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site-source"
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "benchmarks/RESULTS.md",
    "docs",
    "examples",
)
FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
"""The opening of a block of code with words after its language, which are for the tests."""


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", *SHOWN], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        target = SOURCE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            target.write_text(FENCE.sub(r"\1", (ROOT / name).read_text()))
        else:
            shutil.copyfile(ROOT / name, target)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--config-file", "zensical.toml"]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
