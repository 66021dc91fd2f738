"""The table of dtypes says what torch says."""

from __future__ import annotations

import pytest
import torch

from ckptengine.format.dtypes import DTYPES

REFUSED = {  # by torch's names: quantised, of less than a byte, or without any operation
    *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
    *("bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bit"),
    *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
}


def of_torch() -> dict[str, torch.dtype]:
    named = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {name: dtype for name, dtype in named.items() if str(dtype) == f"torch.{name}"}


def test_every_dtype_of_torch_is_stored_or_refused_on_purpose() -> None:
    assert set(of_torch()) - set(DTYPES) <= REFUSED
    assert not set(DTYPES) & REFUSED


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", sorted(set(DTYPES) & set(of_torch())))
def test_sizes_and_storage_classes_are_torchs(name: str) -> None:
    dtype = of_torch()[name]
    assert DTYPES[name].itemsize == dtype.itemsize
    legacy = DTYPES[name].legacy
    assert legacy is None or getattr(torch, legacy).dtype == dtype
