"""The mechanism graph (the IR): what each node of a model does to axes and units. It knows no framework.

graph        the data: Graph, Node, Value, and the tensors that nodes read
ops/         one place per op, in files by family: its attributes, shape rule, meaning and spec
spec         what a spec says
axes         where the units of an axis go when a value is reshaped
verify       whether a graph is well formed, and every node as its op declares
text         the printed form, and its parser
evaluate     folded parameters, and running a graph in numpy, in float64
cost         parameters, bytes and multiply-accumulates
fingerprint  which model a plan was made for
"""
