"""What cmrc knows about each ONNX op.

table      one row per op                           view       what a row sees of a node, and what it returns
rows       rows that take more than a line          writers    what changes in a node besides its inputs
layout     indexing, reshapes, concatenations       rewire     the inputs of a changed node
fused      ops that do several things at once       targets    target shapes of Reshape, Expand and Resize
attention  attention and rotary embeddings          positions  Gather, Slice and Split
"""
