"""The ONNX host: an onnx_ir.Model, run by onnxruntime.

host         OnnxHost: loading, reading, building, running      ops      the table: one row per ONNX op
load         a file                                             sound    whether a model can be trusted to be one
read         the model as IR                                    write    a changed IR, into a clone of the model
patch        the clone that is being changed                    finish   what is left to do when all nodes are written
insert       the few nodes that the compiler adds               save     files that appear whole or not at all
annotations  a plan that is written on the model                names    what a user may call a value
shapes       inferred shapes and dtypes                         sizes    sizes that a model reads from itself
defaults     inputs that have a default
details      what tells a node from another of its op
causes       what is behind an error of onnx_ir
bodies       graphs inside If, Loop and Scan                    piece    a part of the model between two cuts
session      onnxruntime sessions                               bench    latency of files, side by side
"""
