"""What cmrc knows about each ONNX op.

table      one row per op                           view       what a row sees of a node, and what it returns
rows       rows that take more than a line          writers    what changes in a node besides its inputs
layout     indexing, reshapes, concatenations       fused      ops that do several things at once
attention  attention and rotary embeddings
"""
