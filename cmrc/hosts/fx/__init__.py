"""The torch host: a model that torch.export has traced.

host          an nn.Module into a host, FxHost: what a host offers, put together
lifted        the exported program                           clean        its graph without guards and in-place ops
schema, ops/  aten calls by argument name; one row per op    read         the graph into the IR
write         a changed IR into a copy of the graph, with    draft, patch, insert
module        the result as a trainable GraphModule          load         the result into the user's own nn.Module and its config
piece         a part of the model between two cuts           gradient     derivatives of a loss by inner values
memory        tensors and arrays                             annotations  a plan's do's on the nodes
"""
