"""A module imports from its own package and from lower floors; what tools start with needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckptengine

ROOT = Path(ckptengine.__file__).parent
FLOORS = {
    "errors": 0, "types": 0, "protocols": 0, "config": 0, "events": 0,
    "pause": 0,
    "format": 1, "store": 1,
    "state": 2, "plan": 2, "snapshot": 2, "persist": 2,
    "repository": 3,
    "retention": 4, "restore": 4, "reuse": 4,
    "save_job": 5,
    "engine": 6,
    "demo": 7, "testing": 7,
    "cli": 8,
    "__main__": 9,
}  # fmt: skip
MODULES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")
# What the persister and the tools run on: neither may cost the start of torch.
WITHOUT_TORCH = ["ckptengine", "ckptengine.save_job", "ckptengine.cli.main", "ckptengine.cli.ls",
                 "ckptengine.cli.verify", "ckptengine.cli.inspect", "ckptengine.cli.diff",
                 "ckptengine.cli.gc"]  # fmt: skip


def room(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> set[str]:
    """Dotted names of the package's own modules that `path` imports, wherever in the file."""
    package = ["ckptengine", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("ckptengine.")}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if not module.startswith("ckptengine"):
                continue
            if module == "ckptengine":  # `from .. import config`
                names |= {f"ckptengine.{alias.name}" for alias in node.names}
            else:
                names.add(module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stay_on_or_below_their_floor(path):
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert here in FLOORS, f"{here} has no floor: give it one here and in DESIGN.md"
    for name in imported(path):
        there = room(name)
        if FLOORS[here] >= 7 and (there in ckptengine.__all__ or there == "__version__"):
            continue  # users of the public surface
        assert there in FLOORS, f"{name} has no floor"
        beside = there == here or FLOORS[there] == FLOORS[here] == 0
        assert beside or FLOORS[there] < FLOORS[here], f"{path.name} imports {name}"


def test_only_the_repository_writes_commit_records():
    writers = [
        path.relative_to(ROOT)
        for path in MODULES
        if "to_bytes()" in path.read_text() and path.name != "manifest.py"
    ]
    assert writers == [Path("repository.py")]


def test_only_one_module_knows_the_classes_of_dcp():
    knowing = [
        path.relative_to(ROOT)
        for path in MODULES
        if "torch.distributed.checkpoint import" in path.read_text()
    ]
    assert knowing == [Path("format/torch_dist.py")]


def test_no_module_opens_files_behind_the_crash_recorder():
    allowed = {"cli", "demo", "testing"}
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                modes = [str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)]
                writes = any(set(mode) & set("wax+") for mode in modes)
                assert not (node.func.id == "open" and writes), f"{path}:{node.lineno}"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
