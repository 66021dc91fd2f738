"""From raw samples to tables: medians with their spread, each beside the machine's own limit."""

from __future__ import annotations

from typing import Any

from . import workloads
from .harness import Spread, spread
from .workload import WRITE, Figure, Workload

Results = dict[str, Any]


def workload(results: Results) -> Workload:
    """The workload that was measured."""
    return workloads.get(results.get("workload", "save_restore"))  # the first results named none


def best_limit(results: Results, figure: Figure) -> tuple[str, Spread] | None:
    """The limit with the lowest median among those that were measured."""
    found = [(name, limit_spread(results, name)) for name in figure.limits]
    if figure.limits == WRITE and not any(s for _, s in found):
        found = [("write buffered", limit_spread(results, "write buffered"))]  # O_DIRECT refused
    known = [(name, s) for name, s in found if s]
    return min(known, key=lambda item: item[1].median) if known else None


def limit_spread(results: Results, name: str) -> Spread | None:
    """The spread of one limit, whichever entry measured it."""
    for entry in results["limits"].values():
        if samples := entry["figures"].get(name):
            return spread(samples)
    return None


def ratio(figure: Figure, seconds: float, limit: Spread | None) -> str:
    """`1.3 x` of the limit's time, or `0.85` of its speed."""
    if limit is None:
        return ""
    if figure.cost:
        return f"{seconds / limit.median:.1f} x"
    return f"{limit.median / seconds:.2f}" if seconds > 0 else ""


def render(results: Results) -> str:
    """Markdown: where it was measured, one table over all, one per figure with the spread."""
    parts = [_heading(results), _summary(results)]
    parts += [_limits(results)] if results["limits"] else []
    parts += [table for figure in workload(results).figures if (table := _detail(results, figure))]
    return "\n\n".join([*parts, *_notes(results)]) + "\n"


def size(nbytes: float) -> str:
    """As a person would say it."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _heading(results: Results) -> str:
    facts, settings = results["machine"], results["settings"]
    state = results["state"]
    packages = ", ".join(f"{k} {v}" for k, v in facts["packages"].items() if v)
    return (
        f"{state['items']} fp32 tensors, {size(state['bytes'])}; medians of "
        f"{settings['rounds']} interleaved rounds after {settings['warmup']} of warm-up. "
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 1e9:.0f} GB; Linux "
        f"{facts['kernel']}, {facts['file_system']['type']}; Python {facts['python']}, {packages}; "
        f"revision {facts['git']}; {results['started']}."
    )


def _summary(results: Results) -> str:
    entries = results["contenders"].values()
    figures = [f for f in workload(results).figures if any(_samples(e, f) for e in entries)]
    first = workload(results).first
    header = ["", *(f.name for f in figures), *(f"first {name}" for name in first)]
    rows = []
    for name, entry in results["contenders"].items():
        if entry["unavailable"]:
            rows.append([name, entry["unavailable"], *[""] * (len(header) - 2)])
            continue
        row = [name]
        for figure in figures:
            samples = _samples(entry, figure)
            row.append(_cell(results, figure, spread(samples).median) if samples else "")
        row += [f"{entry['first'][f]:.2f}" if f in entry["first"] else "" for f in first]
        rows.append(row)
    limit_row = ["limit"]
    for figure in figures:
        limit = best_limit(results, figure)
        limit_row.append(_number(limit[1].median) if limit else "")
    return _table(header, [*rows, *([limit_row] if results["limits"] else [])])


def _cell(results: Results, figure: Figure, median: float) -> str:
    limit = best_limit(results, figure)
    shown = ratio(figure, median, limit[1] if limit else None)
    return f"{_number(median)} ({shown})" if shown else _number(median)


def _limits(results: Results) -> str:
    nbytes = results["state"]["bytes"]
    rows = [
        [name, *_spread_cells(spread(samples)), f"{nbytes / spread(samples).median / 1e9:.2f}"]
        for entry in results["limits"].values()
        for name, samples in entry["figures"].items()
    ]
    failed = [
        f"{name}: {e['unavailable']}" for name, e in results["limits"].items() if e["unavailable"]
    ]
    table = _table(["limits of the machine", "median s", "min to max", "quartiles", "GB/s"], rows)
    return "\n".join([table, *failed])


def _detail(results: Results, figure: Figure) -> str | None:
    rows = []
    limit = best_limit(results, figure)
    header = [f"{figure.title} ({figure.unit})", "median", "min to max", "quartiles"]
    if limit:
        header += ["x limit" if figure.cost else "of limit"]
    if not figure.cost and limit:
        header += ["GB/s"]
    for name, entry in results["contenders"].items():
        if samples := _samples(entry, figure):
            found = spread(samples)
            row = [name, *_spread_cells(found)]
            if limit:
                row.append(ratio(figure, found.median, limit[1]))
            if not figure.cost and limit:
                row.append(f"{results['state']['bytes'] / found.median / 1e9:.2f}")
            rows.append((found.median, row))
    if not rows:
        return None
    ordered = [row for _, row in sorted(rows, key=lambda item: item[0])]
    if limit:
        ordered.append([f"limit: {limit[0]}", *_spread_cells(limit[1])])
    return _table(header, ordered)


def _notes(results: Results) -> list[str]:
    notes = [
        workload(results).notes,
        _quietness(results),
    ]
    entries = {**results["limits"], **results["contenders"]}
    for name, entry in entries.items():
        for detail in entry["details"]:
            for kind, share in detail.get("resident", {}).items():
                if ("cold" in kind and share > 0.01) or ("warm" in kind and share < 0.99):
                    notes.append(
                        f"Round {detail['round']}, {name}, {kind}: {share:.0%} of the pages were "
                        "in the page cache."
                    )
    return notes


def _quietness(results: Results) -> str:
    counted = [entry for entry in results["rounds"] if entry["round"] >= 0]
    stolen = sum(entry["steal_seconds"] for entry in counted)
    loads = ", ".join(f"{entry['load']:.1f}" for entry in counted)
    return (
        f"Load average at the end of each round: {loads}. CPU stolen by the host: {stolen:.1f} s."
    )


def _samples(entry: dict[str, Any], figure: Figure) -> list[float]:
    return [] if entry["unavailable"] else entry["figures"].get(figure.name, [])


def _spread_cells(found: Spread) -> list[str]:
    low, high = found.quartiles
    return [
        _number(found.median),
        f"{_number(found.low)} to {_number(found.high)}",
        f"{_number(low)} to {_number(high)}",
    ]


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    filled = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    # A reason why something cannot run is long, with empty cells beside it: it widens no column.
    widths = [
        max(len(line[i]) for line in [header, *filled] if i == 0 or len(line[i]) < 40)
        for i in range(len(header))
    ]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, filled)])
