"""What the passes share.

rewriter   what a rule may answer, constants that arrive, the record of a pipeline, the walk down a graph, what runs the rules
absorb     folding into linear maps, convolutions, means and norms; sums that follow each other become one
contract   constants that meet products of values, and attention
runtime    constants that exist only when the model runs
"""
