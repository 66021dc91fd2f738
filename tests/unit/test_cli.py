"""The tools on real directories: tables for people, JSON for programs, exit codes for scripts."""

import json
import subprocess
import sys

import pytest
import torch

import ckptengine as ce
from ckptengine.cli.main import main
from ckptengine.store.ownership import Ownership


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run with steps 1 to 3, a candidate of step 3, and what a dead save left behind."""
    root = tmp_path_factory.mktemp("cli") / "run"
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "lr": 0.5, "names": ["a", "b"]}
    with ce.Engine(root) as engine:
        for step in (1, 2, 3):
            state["model"]["w"] += 1
            engine.save(state, step=step, metrics={"loss": 1 / step}, user={"by": "test"})
        engine.save(state, step=3, candidate=True)
    (root / ".tmp-step-00000009-abc").mkdir()
    return root


@pytest.fixture
def root(template, tmp_path):
    import shutil

    shutil.copytree(template, tmp_path / "run")
    return tmp_path / "run"


def flip_a_byte(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def payload_offset(root, name="step-00000003"):
    data = (root / name / "__0_0.distcp").read_bytes()
    return data.index(torch.arange(6.0).add(3).numpy().tobytes())


def call(capsys, *words):
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_ls_tells_what_is_there(root, capsys):
    code, out, _ = call(capsys, "ls", root)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["1", "0", "good"], ["2", "0", "good"], ["3", "0", "good"], ["3", "1", "candidate"],
    ]  # fmt: skip
    assert "loss=0.5" in lines[2]
    assert "1 unfinished" in lines[5]


def test_ls_json_is_what_the_manifests_say(root, capsys):
    code, out, _ = call(capsys, "ls", root, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["step"], row["state"]) for row in rows] == [
        (1, "good"), (2, "good"), (3, "good"), (3, "candidate"),
    ]  # fmt: skip
    assert rows[0]["user"] == {"by": "test"}
    assert rows[0]["nbytes"] == sum(
        p.stat().st_size for p in (root / "step-00000001").iterdir() if p.name != "manifest.json"
    )


def test_ls_marks_a_cut_file_and_a_lost_record_as_damaged(root, capsys):
    (root / "step-00000001" / "manifest.json").unlink()
    with (root / "step-00000002" / "__0_0.distcp").open("r+b") as file:
        file.truncate(10)
    code, out, _ = call(capsys, "ls", root, "--json")
    assert code == 0
    assert [row["state"] for row in json.loads(out)][:3] == ["damaged", "damaged", "good"]


def test_ls_of_nothing(tmp_path, capsys):
    assert call(capsys, "ls", tmp_path)[0] == 0
    code, _, err = call(capsys, "ls", tmp_path / "absent")
    assert code == 3
    assert "no such directory" in err


def test_verify_passes_and_names_damage(root, capsys):
    assert call(capsys, "verify", root, "--all")[0] == 0
    flip_a_byte(root / "step-00000003" / "__0_0.distcp", payload_offset(root))
    code, out, _ = call(capsys, "verify", root)
    assert code == 4
    assert "damaged" in out
    assert "__0_0.distcp: wrong checksum" in out
    assert call(capsys, "verify", root, "--step", 2)[0] == 0
    assert call(capsys, "verify", root / "step-00000003")[0] == 4
    code, out, _ = call(capsys, "verify", root, "--all", "--json")
    assert code == 4
    assert [bool(row["problems"]) for row in json.loads(out)] == [False, False, True, False]


def test_verify_reports_a_missing_file_and_a_missing_step(root, capsys):
    (root / "step-00000003" / ".metadata").unlink()
    code, out, _ = call(capsys, "verify", root)
    assert code == 4
    assert ".metadata: the file is missing" in out
    assert call(capsys, "verify", root, "--step", 7)[0] == 3


def test_inspect_lists_keys_that_load_takes(root, capsys):
    code, out, _ = call(capsys, "inspect", root)
    assert code == 0
    assert "model/w" in out
    assert "2x3" in out
    found = json.loads(call(capsys, "inspect", root, "--step", 2, "--json")[1])
    assert found["step"] == 2
    assert found["tensors"]["model/w"]["shape"] == [2, 3]
    assert found["values"] == {"lr": 0.5, "names": ["a", "b"]}
    for key in [*found["tensors"], *found["values"]]:
        assert len(ce.load(root, keys=[key])) == 1


def test_diff_compares_bytes_and_forms(root, capsys):
    code, out, _ = call(capsys, "diff", root / "step-00000001", root / "step-00000002", "--json")
    assert code == 0
    assert json.loads(out)["changed"] == ["model/w"]
    assert json.loads(out)["same"] == ["lr", "names"]
    with ce.Engine(root) as engine:
        engine.save({"model": {"w": torch.zeros(3, 3)}, "more": 1}, step=4)
    code, out, _ = call(capsys, "diff", root / "step-00000002", root, "--exit-code")
    assert code == 1
    assert "model/w" in out
    assert "only in the second" in out
    assert call(capsys, "diff", root, root, "--exit-code")[0] == 0


def test_gc_removes_leftovers_and_what_is_not_kept(root, capsys):
    code, out, _ = call(capsys, "gc", root, "--keep", 1, "--dry-run")
    assert code == 0
    assert "would remove step-00000001" in out
    assert (root / "step-00000001").exists()
    code, out, _ = call(capsys, "gc", root, "--keep", 1, "--json")
    assert code == 0
    assert json.loads(out)["deleted"] == ["step-00000001", "step-00000002"]
    assert sorted(p.name for p in root.iterdir()) == [
        ".owner", "step-00000003", "step-00000003.1",
    ]  # fmt: skip


def test_gc_without_rules_removes_no_checkpoint(root, capsys):
    assert call(capsys, "gc", root)[0] == 0
    assert len(list(root.glob("step-*"))) == 4
    assert not list(root.glob(".tmp-*"))


def test_gc_keeps_damaged_ones_unless_told(root, capsys):
    (root / "step-00000001" / "manifest.json").write_text("{}")
    call(capsys, "gc", root, "--keep", 1)
    assert (root / "step-00000001").exists()
    call(capsys, "gc", root, "--damaged")
    assert not (root / "step-00000001").exists()


def test_gc_never_removes_the_only_thing_left(root, capsys):
    for manifest in root.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    assert call(capsys, "gc", root, "--damaged", "--keep", 1)[0] == 0
    assert len(list(root.glob("step-*"))) == 4


def test_gc_is_refused_while_a_run_writes(root, capsys):
    owner = Ownership(str(root), timeout=1)
    try:
        code, _, err = call(capsys, "gc", root, "--keep", 1)
    finally:
        owner.release()
    assert code == 5
    assert "another engine" in err
    assert len(list(root.glob("step-*"))) == 4


def test_wrong_usage_is_2(root, capsys):
    assert call(capsys, "gc", root, "--keep", 0)[0] == 2
    assert call(capsys, "gc", root, "--keep-best", 2)[0] == 2
    assert call(capsys, "ls", "s3://bucket/run")[0] == 2


def test_ls_starts_without_torch(root):
    code = (
        "import sys; from ckptengine.cli.main import main; main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "ls", str(root)], check=False)
    assert done.returncode == 0
