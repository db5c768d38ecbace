"""What cmrc knows about each ONNX op, in one package.

table     one row per op                       view      what a row sees of a node
rows      rows that take more than a line      layout    reshapes, slices, concatenations
fused     onnxruntime's fused ops              patch     how a changed node is written back
"""
