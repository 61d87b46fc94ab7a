"""What `insitu doctor` says before a run, against what the run directly after it takes.

    python benchmarks/doctor.py             the table (about 8 minutes)
    python benchmarks/run.py doctor         the same into RESULTS.md

The runs are the quickstart, and it with a few episodes in flight, for a third of its epochs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
FILE = ROOT / "examples/tic_tac_toe/grpo.yml"
CASES = {
    "quickstart": (),
    "8 in flight, 4 epochs": ("-o", "eval.general.max_concurrency", "8", "-o", "finetuning.num_epochs", "4"),
}
LIMIT = 2.0
"""Factor by which an estimate of the whole run may differ from the truth."""


def insitu(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "insitu", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def measure(options: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, float]]:
    """The doctor's answer, with its own `seconds`, and what the run took: seconds, and bytes of its folder."""
    started = time.perf_counter()
    said = json.loads(insitu("doctor", str(FILE), "--json", *options))
    said["seconds"] = time.perf_counter() - started
    with TemporaryDirectory() as folder:
        started = time.perf_counter()
        insitu("finetune", str(FILE), *options, "-o", "finetuning.output_dir", f"{folder}/run")
        total = time.perf_counter() - started
        run = Path(folder) / "run"
        epochs = [json.loads(line)["seconds"] for line in (run / "training_metrics.jsonl").read_text().splitlines()]
        validations = json.loads((run / "validation_history.json").read_text())
        return said, {
            "total_seconds": total,
            "collect_seconds_per_epoch": fmean(epoch["collect"] for epoch in epochs),
            "train_seconds_per_epoch": fmean(epoch["train"] for epoch in epochs),
            "validation_seconds": fmean(validation["seconds"] for validation in validations),
            "disk_bytes": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        }


def report() -> str:
    lines = [
        f"## The doctor's estimate (limit for the whole run: a factor of {LIMIT:g})",
        "",
        "| run | | estimate | truth | ratio |",
        "|---|---|---|---|---|",
    ]
    notes = []
    for name, options in CASES.items():
        said, truth = measure(options)
        for key, actual in truth.items():
            estimate = said["estimate"][key]
            lines.append(f"| {name} | {key} | {estimate:.4g} | {actual:.4g} | {estimate / actual:.2f} |")
        codes = ", ".join(finding["code"] for finding in said["findings"]) or "nothing"
        notes.append(f"{name}: found {codes}; took {said['seconds']:.0f} s itself.")
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(report())
