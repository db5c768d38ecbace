"""What the passes share.

outcome    what a rule may answer, and the record of a pipeline
driver     what runs the rules
rewriter   the walk down a graph, and where the axes of operands lie in a result
known      units that are replaced by constants
absorb     folding into linear maps, convolutions, means and norms
contract   constants that meet products of values, and attention
runtime    constants that exist only when the model runs
addends    sums that follow each other become one
fused      nodes of a host that are several ops of the IR
"""
