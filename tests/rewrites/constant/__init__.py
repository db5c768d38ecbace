"""The rewrites of constant_fold, by constants known before the model runs."""

from __future__ import annotations

from rewrites.constant.along import ALONG
from rewrites.constant.attention import ATTENTION
from rewrites.constant.conv import CONV
from rewrites.constant.do import DO
from rewrites.constant.layout import LAYOUT
from rewrites.constant.linear import LINEAR
from rewrites.constant.pointwise import POINTWISE
from rewrites.start import Example

CONSTANT: dict[str, Example] = {**LINEAR, **CONV, **POINTWISE, **ALONG, **LAYOUT, **ATTENTION, **DO}
