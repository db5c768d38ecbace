"""What the passes share.

driver     what runs the rules                             outcome   what becomes of a rule, and the record of it
rewriter   the walk down the graph, and questions of axes
known      units that are replaced by constants            absorb    folding into linear maps and convolutions
contract   constants that meet products and attention      runtime   constants that exist only when the model runs
addends    biases beside each other become one             fused     nodes of a host that are several ops of the IR
"""
