"""Facts about the machine and the software, recorded beside every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "numpy",
    "zlib-ng",
    "zstandard",
    "safetensors",
    "torch_checkpointing",
    "torchsnapshot",
    "nvidia-resiliency-ext",
)


def facts(directory: Path) -> dict[str, Any]:
    """What a reader needs to judge a figure measured in `directory`."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "reserved_hugepages": _field("/proc/meminfo", "HugePages_Total"),
        "file_system": _mount(directory),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git(),
    }


def noise() -> dict[str, float]:
    """Load of others and seconds stolen by the hypervisor so far, to be compared round by round."""
    ticks = os.sysconf("SC_CLK_TCK")
    cpu = (_read("/proc/stat") or "").split("\n", 1)[0].split()
    return {"load": os.getloadavg()[0], "steal": int(cpu[8]) / ticks if len(cpu) > 8 else 0.0}


def children_cpu() -> float:
    """CPU seconds of all our descendants, live or reaped by one of them (10 ms ticks)."""
    ticks = os.sysconf("SC_CLK_TCK")
    reaped = os.times()
    seconds = reaped.children_user + reaped.children_system
    for pid in _family() - {os.getpid()}:
        if fields := _stat(pid):
            seconds += sum(map(int, fields[11:15])) / ticks
    return seconds


def written() -> int:
    """Bytes that we and all our descendants, live or reaped, have sent to disks or are about to."""
    return sum(int(_field(f"/proc/{pid}/io", "write_bytes") or 0) for pid in _family())


def resident() -> int:
    """Bytes of memory of us and all our descendants, what is shared counted once (the sum of PSS)."""
    found = (_field(f"/proc/{pid}/smaps_rollup", "Pss") for pid in _family())
    return sum(int(value.split()[0]) << 10 for value in found if value)


def _family() -> set[int]:
    """Our process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := _stat(int(entry))):
            parents[int(entry)] = int(fields[1])
    family = {os.getpid()}
    while found := {pid for pid, up in parents.items() if up in family and pid not in family}:
        family |= found
    return family


def _stat(pid: int) -> list[str]:
    """The fields of a process after its name, from its state on; none if it has gone."""
    stat = _read(f"/proc/{pid}/stat")
    # The command may hold spaces and brackets: fields are counted from the last bracket.
    return stat[stat.rindex(")") + 2 :].split() if stat else []


def _mount(directory: Path) -> dict[str, str]:
    path = directory.resolve()
    best = ("", "unknown", "unknown")
    for line in (_read("/proc/self/mounts") or "").splitlines():
        device, point, kind = line.split()[:3]
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, device)
    return {"type": best[1], "device": best[2], "mounted_at": best[0]}


def _git() -> str:
    def ask(*args: str) -> str:
        root = Path(__file__).parent
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        revision = ask("rev-parse", "--verify", "-q", "HEAD") or "no commit"
        return revision + (" with local changes" if ask("status", "--porcelain") else "")
    except OSError:
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str | None:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:  # a process that has just gone, a file this kernel lacks
        return None
