"""The workloads, one module each: its figures, who takes part, and what happens in a turn."""

from __future__ import annotations

import importlib

from ..workload import Workload

NAMES = ("save_restore", "load", "many", "large", "frozen", "tiny", "memory")


def get(name: str) -> Workload:
    """The workload of that name. Only its module is imported."""
    workload: Workload = importlib.import_module(f"{__name__}.{name}").WORKLOAD
    return workload
