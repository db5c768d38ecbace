"""What the passes share.

rewriter   the walk, the outcome of a rule, the record of what was done
known      units that are replaced by constants            absorb    folding into linear maps and convolutions
contract   constants that meet products and attention      runtime   constants that exist only when the model runs
addends    biases beside each other become one             fused     nodes of a host that are several ops of the IR
"""
