"""The ops of the IR, one spec each, in files by family. A new op is one entry there, and a rule in each pass that has something to say about it.

affine       linear, conv, do, select, turn, and what folding makes of a weight
attention    matmul, attention
functions    pointwise and along, with one spec per function
layout       reshape, expand, transpose, concat, embedding, plane; opaque
"""

from __future__ import annotations

from cmrc.ir.ops.affine import AFFINE
from cmrc.ir.ops.attention import PRODUCTS
from cmrc.ir.ops.functions import FUNCTIONS
from cmrc.ir.ops.layout import LAYOUT
from cmrc.ir.spec import Op

OPS: dict[str, Op] = {**AFFINE, **PRODUCTS, **FUNCTIONS, **LAYOUT}
