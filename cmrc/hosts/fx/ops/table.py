"""All rows, by overload."""

from __future__ import annotations

from cmrc.hosts.fx.ops import affine, along, layout, pointwise
from cmrc.hosts.fx.ops.row import ROWS

__all__ = ["ROWS", "affine", "along", "layout", "pointwise"]
