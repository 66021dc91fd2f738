"""Horizontal bars, one panel per figure, the machine's limit marked.

python -m benchmarks.plot results.json [results.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .harness import spread
from .report import Results, best_limit, ratio, size, workload
from .workload import Figure

_OURS = "ckptengine"


def plot(results: Results, path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [f for f in workload(results).figures if _bars(results, f)]
    if not shown:
        raise SystemExit("these results hold no figure that could be drawn")
    columns = 2 if len(shown) > 1 else 1
    rows = -(-len(shown) // columns)
    bars = max(len(_bars(results, f)) for f in shown)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(7 * columns, rows * (1.2 + 0.32 * bars)), squeeze=False
    )
    panels = list(axes.flat)
    for panel, what in zip(panels, shown, strict=False):
        _draw(panel, results, what)
    for panel in panels[len(shown) :]:
        panel.axis("off")
    facts, state = results["machine"], results["state"]
    figure.suptitle(
        f"{size(state['bytes'])} of fp32 state, {facts['cpu']}, {facts['cores']} cores, "
        f"{facts['file_system']['type']}, torch {facts['packages']['torch']}: medians of "
        f"{results['settings']['rounds']} rounds, lines from least to most",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(results: Results, figure: Figure) -> list[tuple[str, list[float]]]:
    found = [
        (name, entry["figures"][figure.name])
        for name, entry in results["contenders"].items()
        if not entry["unavailable"] and entry["figures"].get(figure.name)
    ]
    return sorted(found, key=lambda item: spread(item[1]).median, reverse=True)


def _draw(panel: Any, results: Results, figure: Figure) -> None:
    bars = _bars(results, figure)
    limit = best_limit(results, figure)
    spreads = [spread(samples) for _, samples in bars]
    panel.barh(
        [name for name, _ in bars],
        [s.median for s in spreads],
        xerr=[
            [s.median - s.low for s in spreads],
            [s.high - s.median for s in spreads],
        ],
        color=["tab:orange" if name.startswith(_OURS) else "tab:blue" for name, _ in bars],
        error_kw={"ecolor": "0.3", "elinewidth": 1, "capsize": 2},
        height=0.7,
    )
    widest = max(s.high for s in spreads)
    for row, found in enumerate(spreads):
        share = ratio(figure, found.median, limit[1] if limit else None)
        text = f" {found.median:.2f}" + (f"  ({share})" if share else "")
        panel.text(max(found.high, 0), row, text, va="center", fontsize=8)
    if limit:
        panel.axvline(limit[1].median, color="tab:red", linestyle="--", linewidth=1)
        meaning = "times the limit" if figure.cost else "share of the limit's speed"
        panel.set_xlabel(
            f"{figure.unit}; red: {limit[0]}, {limit[1].median:.2f} ({meaning})", fontsize=8
        )
    else:
        panel.set_xlabel(figure.unit, fontsize=8)
    panel.set_title(figure.title, fontsize=10)
    panel.set_xlim(min(0.0, *(s.low for s in spreads)), widest * 1.3)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.plot", description="Draw a run's PNG.")
    parser.add_argument("results", type=Path, help="the JSON file of a run")
    parser.add_argument("png", type=Path, nargs="?", help="default: beside it")
    args = parser.parse_args()
    target = args.png or args.results.with_suffix(".png")
    plot(json.loads(args.results.read_text()), target)
    print(target)


if __name__ == "__main__":
    main()
