"""A host is the model's own graph, in a framework: `fx` (torch.export) or `onnx` (onnx_ir).

protocols    what every host offers, and what only some hosts offer
clamp        the arithmetic of a do that remains in the model
inputs       random inputs of the declared types and shapes
fx, onnx     one room per framework; nothing else imports it
"""
