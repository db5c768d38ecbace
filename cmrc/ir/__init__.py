"""The mechanism graph (the IR): what each node of a model does to axes and units. It knows no framework.

graph        the data: Graph, Node, Value, and the tensors that nodes read
ops          one spec per op; its parts in shapes and meanings, under the name of the op
functions    one spec per function of `pointwise` and `along`
spec         what a spec says, the attributes of each op, and the check of a node against it
axes         where the units of an axis go when a value is reshaped
verify       whether a graph is well formed
text         the printed form, and its parser
evaluate     folded parameters, and running a graph in numpy, in float64
cost         parameters, bytes and multiply-accumulates
fingerprint  which model a plan was made for
"""
