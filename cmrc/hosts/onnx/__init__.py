"""The ONNX host: an onnx_ir.Model, run by onnxruntime.

host      OnnxHost: loading, reading, building, running      ops      the table: one row per ONNX op
read      the model into the IR                              write    a changed IR into a clone of the model
insert    the few nodes that the compiler adds               save     whole or not at all
names     what a user may call a value                       shapes, sizes   inferred and computed shapes
session   onnxruntime sessions                               piece    a part of the model between two cuts
bench     latency of files, side by side
"""
