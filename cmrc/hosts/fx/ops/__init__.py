"""The table of aten ops, one row per op. Adding an op is adding one row (and its test).

row        what a row gives: the IR op, its operands and attributes, and where a size that may shrink is written
affine     linear, convolution, attention, embedding        pointwise  element by element
along      over some axes: reductions, pooling, norms       layout     reshape, transpose, concat, slices
table      all rows, by overload
"""
