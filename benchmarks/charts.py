"""Bar charts of a result file of `benchmarks.attention`, one PNG per pass."""

from __future__ import annotations

import json
import os

ORDER = ("fa_cute", "flash-attn-4", "cuDNN", "FA2")
COLOURS = {"fa_cute": "#76b900", "flash-attn-4": "#4c72b0", "cuDNN": "#999999", "FA2": "#d9a441"}
TITLES = {"fwd": "forward", "bwd": "backward", "det": "deterministic backward"}


def draw(path: str) -> list[str]:
    """Write the PNGs beside the file; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(path) as f:
        cells = json.load(f)
    written = []
    for which, title in TITLES.items():
        mine = [c for c in cells if ("det" if c["deterministic"] else c["pass"]) == which]
        if not mine:
            continue
        dims = sorted({c["head_dim"] for c in mine})
        figure, axes = plt.subplots(2, len(dims), figsize=(4 * len(dims), 6), squeeze=False)
        for column, d in enumerate(dims):
            for row, causal in enumerate((False, True)):
                panel(
                    axes[row][column],
                    [c for c in mine if (c["head_dim"], c["causal"]) == (d, causal)],
                )
                axes[row][column].set_title(f"head_dim {d}, {'causal' if causal else 'full'}")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncol=len(labels), frameon=False)
        figure.suptitle(f"{mine[0]['gpu']}, bf16 {title}, 32k tokens, TFLOP/s", y=0.02, fontsize=10)
        figure.tight_layout(rect=(0, 0.03, 1, 0.95))
        written.append(os.path.join(os.path.dirname(path) or ".", f"h200_{which}.png"))
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def panel(axis, cells: list) -> None:
    """Lengths side by side, one bar per contender."""
    cells = sorted(cells, key=lambda c: c["seqlen"])
    names = [n for n in ORDER if any(n in c["contenders"] for c in cells)]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(cells))]
        heights = [c["contenders"].get(name, {}).get("tflops", 0.0) for c in cells]
        bars = axis.bar(places, heights, width, label=name, color=COLOURS[name])
        axis.bar_label(bars, [f"{h:.0f}" for h in heights], fontsize=6, padding=1)
    axis.set_xticks(range(len(cells)), [f"{c['seqlen'] // 1024}k" for c in cells])
    axis.spines[["top", "right"]].set_visible(False)
