"""What the passes share.

rewriter   what a rule may answer, what arrives at it, the record of a pipeline, the walks down and up, and what runs the rules
absorb     folding into linear maps, means and tables; consecutive sums become one
contract   constants in products of two values, and in attention
runtime    constants that exist only when the model runs
"""
