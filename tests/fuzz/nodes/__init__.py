"""One maker of random nodes for each op of docs/ops.md, by what it is to a replacement. Odd attributes are the point.

The order of each table decides what a seed draws.
"""
