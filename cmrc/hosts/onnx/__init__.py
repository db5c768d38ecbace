"""The ONNX host: an onnx_ir.Model, run by onnxruntime.

host     OnnxHost: loading, reading, building, running      ops/     the table: one row per ONNX op
load     a file, and whether it is a sound model            save     files that appear whole or not at all
read     the model as IR                                    write    a changed IR, into a clone of the model
patch    the clone that is being changed                    insert   the few nodes that the compiler adds
nodes    their names, bodies and annotations                shapes   inferred shapes, sizes that a model reads itself
session  onnxruntime sessions, of a part of a model too     bench    latency of files, side by side
"""
