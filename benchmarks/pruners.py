"""The peers that make networks smaller: Torch-Pruning on modules, onnxsim on files. Both set units to zero.

Imported where they are used: nobody needs them who does not measure them.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

CRITERIA = ("L2 of the layer", "group norm", "Taylor")


def criterion(name: str) -> Any:
    """`group norm` is DepGraph's: the norm of a unit's weights in every layer that it is coupled with."""
    import torch_pruning as tp

    criteria: dict[str, Callable[[], Any]] = {
        "L1": lambda: tp.importance.MagnitudeImportance(p=1),
        "L2 of the layer": lambda: tp.importance.GroupMagnitudeImportance(p=2, group_reduction="first"),
        "group norm": lambda: tp.importance.GroupMagnitudeImportance(p=2, group_reduction="mean"),
        "LAMP": lambda: tp.importance.LAMPImportance(p=2),
        "FPGM": lambda: tp.importance.FPGMImportance(p=2),
        "Taylor": lambda: tp.importance.GroupTaylorImportance(),
        "random": lambda: tp.importance.RandomImportance(),
        "BN scale": lambda: tp.importance.BNScaleImportance(),
    }
    return criteria[name]()


def torch_pruned(
    model: nn.Module,
    example: tuple[torch.Tensor, ...],
    layers: Sequence[str],
    name: str,
    *,
    losses: Callable[[nn.Module], Any] = lambda model: (),
    keep: float = 0.5,
) -> nn.Module:
    """A copy whose layers of these names have only a part of their outputs, chosen by Torch-Pruning."""
    scores = scores_of(model, example, layers, name, losses)
    return cut_lowest(model, example, layers, scores, [len(own) - round(keep * len(own)) for own in scores])


def scores_of(
    model: nn.Module,
    example: tuple[torch.Tensor, ...],
    layers: Sequence[str],
    name: str,
    losses: Callable[[nn.Module], Any],
) -> list[np.ndarray]:
    """Torch-Pruning's scores of the outputs of these layers.

    `losses` gives the losses whose gradient Taylor scores need, one after the other.
    """
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.requires_grad_()
    if name == "Taylor":
        for loss in losses(model):
            loss.backward()
    graph, score = _dependencies(model, example), criterion(name)
    scores = []
    for path in layers:
        prune, width = _outputs_of(model.get_submodule(path))
        scores.append(score(graph.get_pruning_group(model.get_submodule(path), prune, idxs=list(range(width)))).numpy())
    return scores


def cut_lowest(
    model: nn.Module,
    example: tuple[torch.Tensor, ...],
    layers: Sequence[str],
    scores: Sequence[np.ndarray],
    gone: Sequence[int],
) -> nn.Module:
    """A copy without the outputs of the lowest scores, so many of each layer."""
    model = copy.deepcopy(model)
    graph = _dependencies(model, example)
    for path, own, count in zip(layers, scores, gone, strict=True):
        prune, _ = _outputs_of(model.get_submodule(path))
        lowest = np.argsort(own, kind="stable")[:count].tolist()
        if lowest:
            graph.get_pruning_group(model.get_submodule(path), prune, idxs=lowest).prune()
    return model.eval()


def _dependencies(model: nn.Module, example: tuple[torch.Tensor, ...]) -> Any:
    import torch_pruning as tp

    for parameter in model.parameters():
        parameter.requires_grad_()
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return tp.DependencyGraph().build_dependency(model, example_inputs=example)


def _outputs_of(layer: nn.Module) -> tuple[Any, int]:
    """How Torch-Pruning cuts the outputs of a layer, and how many there are."""
    import torch_pruning as tp

    if isinstance(layer, nn.Conv2d):
        return tp.prune_conv_out_channels, layer.out_channels
    assert isinstance(layer, nn.Linear)
    return tp.prune_linear_out_channels, layer.out_features


def onnxsim_pruned(path: Path, out: Path, parameters: int, *, share: float = 0.5) -> tuple[float, bool]:
    """Prune a file by onnxsim to at most this number of parameters, or else by this share where it cannot get so far.

    Returns the sparsity that it took, found by bisection, and whether it removed anything at all.
    """
    import onnx
    import onnxsim

    with redirect_stdout(io.StringIO()):
        whole, _ = onnxsim.simplify(onnx.load(path))

    def pruned(sparsity: float) -> Any:
        copied = onnx.ModelProto.FromString(whole.SerializeToString())
        return onnxsim.apply_structured_pruning(copied, sparsity=sparsity)

    before, low, high = stored(whole), 0.0, 0.99
    least = stored(pruned(high))
    if least > parameters or least == before:
        model_pruned = pruned(share)
        onnx.save(model_pruned, out)
        return share, stored(model_pruned) < before
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (low, middle) if stored(pruned(middle)) <= parameters else (middle, high)
    onnx.save(pruned(high), out)
    return high, True


def onnxsim_recovered(
    path: Path, out: Path, batches: Sequence[Mapping[str, np.ndarray]], size: int, fits: Callable[[Path], bool]
) -> bool:
    """Prune a file by onnxsim's calibrated scores, and refit it by its ridge regression, at the least sparsity that fits.

    Returns whether any does; else its largest stands there. Sizes are those of its pruning without data, which is quicker.
    """
    import onnx
    import onnxsim

    with redirect_stdout(io.StringIO()):
        whole, _ = onnxsim.simplify(onnx.load(path))
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    count = len(next(iter(joined.values()))) // size * size
    given = [{name: array[i : i + size] for name, array in joined.items()} for i in range(0, count, size)]

    def fitting(sparsity: float) -> bool:
        copied = onnx.ModelProto.FromString(whole.SerializeToString())
        onnx.save(onnxsim.apply_structured_pruning(copied, sparsity=sparsity), out)
        return fits(out)

    low, high = 0.0, 0.95
    reached = fitting(high)
    for _ in range(7 if reached else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if fitting(middle) else (middle, high)
    copied = onnx.ModelProto.FromString(whole.SerializeToString())
    pruned = onnxsim.apply_structured_wanda_pruning(copied, calibration_data=given, sparsity=high)
    onnx.save(onnxsim.apply_pruning_finetune(whole, pruned, calibration_data=given), out)
    return reached


def sizes_of_module(model: nn.Module, example: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Parameters, and multiply-accumulates of one sample."""
    # Of fused attention torch counts nothing on a CPU; of its two products it does.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*(tensor[:1] for tensor in example))
    return {"parameters": sum(p.numel() for p in model.parameters()), "macs": counter.get_total_flops() // 2}


def stored(model: Any) -> int:
    """Numbers with a fraction that an ONNX model stores, as initialisers or constants."""
    constants = [
        a.t for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"
    ]
    floating = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    tensors = [*model.graph.initializer, *constants]
    return sum(math.prod(tensor.dims) for tensor in tensors if tensor.data_type in floating)
