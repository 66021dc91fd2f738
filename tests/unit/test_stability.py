"""Which tensors get files of their own, and when a new layout is worth it."""

from __future__ import annotations

import random

import pytest

from ckptengine.plan import stability
from ckptengine.plan.stability import Stability

KIB = 1 << 10


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "_LEAST", 4 * KIB)


def marks(count: int, *changed: int) -> bytes:
    return bytes(number not in changed for number in range(count))


def test_what_stays_the_same_gets_files_of_its_own_in_its_order() -> None:
    learned = Stability([KIB] * 12)
    assert learned.files() == []
    assert learned.observe(marks(12, 3, 7))
    assert learned.files() == [[0, 1, 2, 4], [5, 6, 8, 9], [10, 11]]
    assert not learned.observe(marks(12, 3, 7))


def test_large_states_have_larger_files() -> None:
    learned = Stability([64 * KIB] * 32)
    learned.observe(marks(32))
    assert [len(file) for file in learned.files()] == [2] * 16


def test_a_tensor_that_changes_leaves_its_file_and_no_other_file_is_touched() -> None:
    learned = Stability([KIB] * 12, stable=range(11))
    before = learned.files()
    assert before == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert not learned.observe(marks(12, 11))
    assert learned.observe(marks(12, 5, 11))
    assert learned.files() == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10]]


def test_what_changes_now_and_then_moves_less_and_less_often() -> None:
    learned = Stability([KIB] * 8)
    moves = []
    for n in range(400):
        changed = {0: (0, 1), 3: (0,)}.get(n, (0,) if n % 3 == 0 else ())
        if learned.observe(marks(8, *changed)):
            moves.append(n)
    # With tensor 1 it is taken for stable, is not, and changes too often to be so again.
    assert moves == [0, 1, 3]
    assert 0 not in {number for file in learned.files() for number in file}


def test_a_tensor_in_a_file_by_itself_may_change_as_it_likes() -> None:
    learned = Stability([KIB] * 8)
    moves = [n for n in range(400) if learned.observe(marks(8, *([0] if n % 3 == 0 else [])))]
    assert moves == [0, 1]
    assert learned.files()[-1] == [0]


def test_little_waste_is_not_worth_a_new_layout() -> None:
    learned = Stability([1000 * KIB, 4, KIB], stable=[2])
    assert not learned.observe(marks(3, 0))
    assert learned.files() == [[2]]


def test_empty_tensors_and_empty_states() -> None:
    learned = Stability([0, KIB, 0], stable=[0, 1])
    assert learned.files() == [[1]]
    learned.observe(marks(3))
    assert learned.files() == [[1]]
    assert not Stability([]).observe(b"")
    assert Stability([]).files() == []


def test_the_number_of_files_is_bounded() -> None:
    learned = Stability([KIB] * 400)
    for number in range(300):
        # One more of them ceases to change with each save.
        learned.observe(marks(400, *range(number, 400)))
        assert len(learned.files()) <= 400 // 4 + stability._MOST


def test_files_of_an_earlier_run_are_taken_over() -> None:
    learned = Stability([KIB] * 6, stable=range(6))
    learned.adopt([[4, 5], [0]])
    assert learned.files() == [[4, 5], [0]]
    assert learned.observe(marks(6, 3))
    assert learned.files() == [[4, 5], [0], [1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_each_tensor_is_in_at_most_one_file(seed: int) -> None:
    chance = random.Random(seed)
    learned = Stability([chance.choice([0, 8, KIB, 9 * KIB]) for _ in range(50)])
    for _ in range(200):
        learned.observe(bytes(chance.random() < 0.9 for _ in range(50)))
        numbers = [number for file in learned.files() for number in file]
        assert len(numbers) == len(set(numbers))
        assert all(file == sorted(file) and file for file in learned.files())
