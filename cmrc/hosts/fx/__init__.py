"""The torch host: a model that torch.export has traced.

host      FxHost: reading, building, running, saving         clean    the exported graph without guards and in-place ops
ops       the table: one row per aten op                     write    a changed IR into a copy of the graph
module    the result as a trainable GraphModule              load     the result into the user's own nn.Module
piece     a part of the model between two cuts               gradient derivatives of a loss by inner values
"""
