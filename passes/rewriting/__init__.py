"""What the passes share.

rewriter   what a rule may answer, the record of a pipeline, the walk down a graph, what runs the rules
known      units that are replaced by constants
absorb     folding into linear maps, convolutions, means and norms; sums that follow each other become one
contract   constants that meet products of values, and attention
runtime    constants that exist only when the model runs
fused      nodes of a host that are several ops of the IR
"""
