"""The ops of the IR: one spec each. A new op is one entry here, and a rule in each pass that has something to say about it.

The parts of an entry stand beside each other in `spec.py` (attributes), `shapes.py` and `meanings.py`, under the name of the op;
the functions of `pointwise` and `along` in `functions.py`.
"""

from __future__ import annotations

from cmrc.ir import meanings, shapes, spec
from cmrc.ir.functions import ALONG, POINTWISE
from cmrc.ir.spec import Op, either, optional, several, value

OPS: dict[str, Op] = {
    # affine
    "linear": Op(
        (either("x"), either("weight"), optional("bias")),
        spec.LinearAttrs,
        shapes.linear,
        meanings.linear,
        affine_in=(0,),
        work=shapes.linear_products,
    ),
    "conv": Op(
        (either("x"), either("weight"), optional("bias")),
        spec.ConvAttrs,
        shapes.conv,
        meanings.conv,
        affine_in=(0,),
        work=shapes.conv_products,
    ),
    # products of values
    "matmul": Op(
        (either("x"), either("y")),
        spec.NoAttrs,
        shapes.matmul,
        meanings.matmul,
        passes=True,
        work=shapes.matmul_products,
    ),
    "attention": Op(
        (either("q"), either("k"), either("v"), optional("mask"), optional("padding")),
        spec.AttentionAttrs,
        shapes.attention,
        meanings.attention,
        passes=True,
        work=shapes.attention_products,
    ),
    # functions
    "pointwise": Op(
        (either("x"), several("others")),
        spec.PointwiseAttrs,
        shapes.pointwise,
        meanings.pointwise,
        passes=True,
        functions=POINTWISE,
    ),
    "along": Op(
        (either("x"), several("parameters")),
        spec.AlongAttrs,
        shapes.along,
        meanings.along,
        passes=True,
        functions=ALONG,
    ),
    # layout
    "reshape": Op(
        (either("x"),), spec.ShapeAttrs, shapes.reshape, meanings.reshape, as_stored=True, passes=True, sized=True
    ),
    "transpose": Op(
        (either("x"),), spec.TransposeAttrs, shapes.transpose, meanings.transpose, as_stored=True, passes=True
    ),
    "concat": Op((several("parts"),), spec.ConcatAttrs, shapes.concat, meanings.concat, passes=True),
    "expand": Op((either("x"),), spec.ShapeAttrs, shapes.expand, meanings.expand, passes=True, sized=True),
    "select": Op((either("x"),), spec.SelectAttrs, shapes.select, meanings.select, as_stored=True, passes=True),
    "embedding": Op((either("ids"), either("table")), spec.EmbeddingAttrs, shapes.embedding, meanings.embedding),
    # the compiler's own
    "do": Op((value("x"), either("value"), optional("weight")), spec.DoAttrs, shapes.do, meanings.do),
    "plane": Op((value("x"),), spec.PlaneAttrs, shapes.plane, meanings.plane),
    # of tensors only: what folding makes of a weight
    "fold_columns": Op((either("weight"), either("mix")), spec.ColumnAttrs, None, meanings.fold_columns),
    "weigh_columns": Op(
        (either("weight"), either("constant")), spec.ColumnAttrs, None, meanings.weigh_columns, as_stored=True
    ),
    "select_in_groups": Op(
        (either("weight"),), spec.GroupedSelectAttrs, None, meanings.select_in_groups, as_stored=True
    ),
    # anything else: only the host knows what it means
    "opaque": Op((several("operands"),), spec.NoAttrs, shapes.as_the_host_says, None),
}
