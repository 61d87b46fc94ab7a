"""Draws examples/real_model/beside_trl.png from the table of `real.score` in RESULTS.md.

python benchmarks/plot_beside_trl.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = {"insitu": "#1f6fb2", "TRL": "#c4572b"}


def main() -> None:
    text = (HERE / "RESULTS.md").read_text()
    table = text[text.index("<!-- real.score -->") : text.index("<!-- end of real.score -->")]
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=110)
    for side, cells in re.findall(r"^\| (insitu|TRL) \| \d \| (.+) \|$", table, re.MULTILINE):
        points = [(float(seconds), float(score)) for score, seconds in re.findall(r"([\d.]+) \((\d+) s\)", cells)]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, color=COLORS[side])
    for side, color in COLORS.items():
        axes.plot([], [], marker="o", color=color, label=side)
    axes.set(xlabel="seconds since the command, without scoring", ylabel="held-out score", ylim=(0.4, 1))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE.parent / "examples/real_model/beside_trl.png")


if __name__ == "__main__":
    main()
