"""The mechanism graph (the IR): what each node of a model does to axes and units. It knows no framework.

graph        the data: Graph, Node, Value, and the tensors that nodes read
ops/         one place per op: its attributes, shape rule, meaning and spec; one file per family of ops
spec         what an op declares about itself
axes         where the units of an axis go when a value is reshaped
verify       whether a graph is well formed, and every node fits what its op declares
text         the printed form, and its parser
tensors      tensor expressions in numbers: folded parameters
evaluate     running a graph in numpy, in float64
cost         parameters, bytes and multiply-accumulates
fingerprint  the model for which a plan was made
"""
