"""The ONNX host: an onnx_ir.Model, run by onnxruntime.

host         OnnxHost: loading, reading, building, running      ops      the table: one row per ONNX op
load         a file, and whether it is a sound model            save     files that appear whole or not at all
read         the model as IR                                    write    a changed IR, into a clone of the model
patch        the clone that is being changed                    insert   the few nodes that the compiler adds
shapes       inferred shapes, sizes that a model reads itself   names    what a user may call a value
annotations  a plan that is written on the model                details  what tells a node from another of its op
bodies       graphs inside If, Loop and Scan                    causes   what is behind an error of onnx_ir
session      onnxruntime sessions, of a part of a model too     bench    latency of files, side by side
"""
