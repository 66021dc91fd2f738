"""Canonical JSON: one text for one value, so that digests over it mean something."""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any) -> bytes:
    """Sorted keys, no spaces, ASCII only, no NaN or Infinity (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
