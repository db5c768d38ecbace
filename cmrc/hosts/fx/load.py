"""Write a lowered model's parameters back into the user's own nn.Module, if only parameters changed.

The config of a transformers model gets the new widths: `save_pretrained` writes the config beside the weights, and
`from_pretrained` builds the model from it. If one attribute can express the new widths (`intermediate_size`, if every layer kept
the same number of units), it is set; if none can, a warning says so immediately, rather than an error at the next load.
transformers is not imported.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from cmrc.errors import HostError
from cmrc.ir.graph import Graph, attributes
from cmrc.ir.ops.affine import ConvAttrs

# The attributes in which a module keeps its own sizes, computed from its weight. Only attributes that it has are set.
SIZES: dict[str, Callable[[torch.Tensor, int], int]] = {
    "in_features": lambda w, groups: w.shape[1],
    "out_features": lambda w, groups: w.shape[0],
    "num_features": lambda w, groups: w.shape[0],
    "num_parameters": lambda w, groups: w.shape[0],
    "embedding_dim": lambda w, groups: w.shape[1],
    "nx": lambda w, groups: w.shape[0],  # transformers' Conv1D keeps its weight as [in, out]
    "nf": lambda w, groups: w.shape[1],
}
ALLOWED = 1e-5  # relative to the output's scale: how closely the module must agree with the lowered graph


def load_into(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    before: Graph,
    after: Graph,
    reference: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Set the tensors and compare the module with `reference`; if they differ, restore everything and say why."""
    inserted = [node for node in after.nodes if not node.origin]
    if inserted:
        raise HostError(
            "the lowered graph has a node that is not part of the module's code",
            node=inserted[0].label,
            op=inserted[0].kind,
            fix="use lowered.module",
        )
    undo: list[Callable[[], None]] = []
    now = {node.name: node for node in after.nodes}
    try:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name in tensors}
        for name, tensor in tensors.items():
            _set_tensor(model, name, tensor, undo)
        for node in before.nodes:
            patched = now.get(node.name)
            if (
                node.op == "conv"
                and patched is not None
                and attributes(patched, ConvAttrs)["groups"] != attributes(node, ConvAttrs)["groups"]
            ):
                _set_attribute(model.get_submodule(node.path), "groups", attributes(patched, ConvAttrs)["groups"], undo)
        update_configs(model, shapes, undo)
        _compare(model, reference, args, kwargs)
    except BaseException:
        for step in reversed(undo):
            step()
        raise


def _set_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor, undo: list[Callable[[], None]]) -> None:
    path, _, last = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
        old = getattr(owner, last)
    except AttributeError as error:
        raise HostError(f"the module has no parameter {name!r}", fix="use lowered.module") from error
    kind: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers

    def put(value: torch.Tensor | None) -> None:
        kind[last] = value

    undo.append(lambda: put(old))
    put(tensor)
    if last == "weight" and tensor.dim() >= 1:
        groups = int(getattr(owner, "groups", 1))
        for attribute, size in SIZES.items():
            if hasattr(owner, attribute) and (tensor.dim() > 1 or attribute.startswith("num_")):
                _set_attribute(owner, attribute, size(tensor, groups), undo)
        if hasattr(owner, "in_channels") and tensor.dim() > 2:
            swapped = bool(getattr(owner, "transposed", False))
            ins, outs = (
                (tensor.shape[0], tensor.shape[1] * groups) if swapped else (tensor.shape[1] * groups, tensor.shape[0])
            )
            _set_attribute(owner, "in_channels", ins, undo)
            _set_attribute(owner, "out_channels", outs, undo)


def _set_attribute(owner: torch.nn.Module, name: str, value: int, undo: list[Callable[[], None]]) -> None:
    old = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, old))
    setattr(owner, name, value)


def _compare(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    if not args and not kwargs:
        raise HostError(
            "there are no example inputs to check the module with", fix="trace the nn.Module with example inputs"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            results = pytree.tree_leaves(model(*args, **kwargs))
            wanted = pytree.tree_leaves(reference(*args, **kwargs))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise HostError(f"the module's forward contains the old sizes: {reason}", fix="use lowered.module") from error
    finally:
        model.train(training)
    for got, want in zip(results, wanted, strict=True):
        if isinstance(want, torch.Tensor) and not torch.allclose(
            got, want, rtol=0.0, atol=ALLOWED * max(float(want.abs().max()), 1e-30)
        ):
            raise HostError("the module does not compute what the lowered graph computes", fix="use lowered.module")


Shapes: TypeAlias = dict[str, tuple[int, ...]]
DERIVED = ("n_inner", "ffn_dim", "intermediate_size")  # None here means "as wide as the architecture says"


def update_configs(model: torch.nn.Module, before: Mapping[str, torch.Size], undo: list[Callable[[], None]]) -> None:
    """Give the model configs of its own whose attributes express the new shapes.

    `before` has the shapes of the parameters that were replaced, under their new owner's names.
    """
    changes = [
        (id(config), name, value)
        for config, attributes_now in _changes(model, before)
        for name, value in attributes_now.items()
    ]
    if changes:
        own = _own_configs(model, undo)
        for config, name, value in changes:
            setattr(own[config], name, value)


def _own_configs(model: torch.nn.Module, undo: list[Callable[[], None]]) -> dict[int, Any]:
    """Copies in place of the configs, by what they copy: two models that were made from one config share it."""
    copies: dict[int, Any] = {}  # also of the configs inside a config
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            undo.append(partial(setattr, module, "config", config))
            module.config = copy.deepcopy(config, copies)
    return copies


def _changes(model: torch.nn.Module, before: Mapping[str, torch.Size]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What has to change in each config."""
    seen: list[Any] = []
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is None or not hasattr(module, "save_pretrained") or any(config is other for other in seen):
            continue
        seen.append(config)
        start = f"{path}." if path else ""
        old = {name.removeprefix(start): tuple(shape) for name, shape in before.items() if name.startswith(start)}
        now = _shapes(module)
        pairs = {
            (was, size)
            for name, shape in old.items()
            for was, size in zip(shape, now.get(name, shape), strict=False)
            if was != size
        }
        if pairs:
            changes, misfits = express(type(module), config, now, pairs)
            if misfits:
                _warn(config, misfits[0], now)
            else:
                yield config, changes


def _warn(config: Any, name: str, now: Shapes) -> None:
    warnings.warn(
        f"no attribute of {type(config).__name__} can express the new widths: {name} is {list(now[name])} now. "
        "from_pretrained will refuse what save_pretrained writes. Keep the same number of units in every layer, or store the "
        "module itself (torch.save), lowered.module, or ONNX by lowered.save",
        stacklevel=8,
    )


def express(
    kind: type[torch.nn.Module], config: Any, now: Shapes, pairs: set[tuple[int, int]]
) -> tuple[dict[str, Any], list[str]]:
    """The attributes of a config that express these shapes, and the tensors that still do not fit.

    Attribute by attribute: one is kept if the model that the config makes then has more of the shapes.
    """
    best, trial = _misfits(kind, config, now), copy.deepcopy(config)
    changes: dict[str, Any] = {}
    for name, value in _candidates(config, pairs):
        if not best:
            break
        kept = getattr(trial, name)
        setattr(trial, name, value)
        misfits = _misfits(kind, trial, now)
        if len(misfits) < len(best):
            best, changes[name] = misfits, value
        else:
            setattr(trial, name, kept)
    return changes, best


def _candidates(config: Any, pairs: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Attributes that had such a size or a number of heads in it, with their new values; and biases that were switched off."""
    for name, value in config.to_dict().items():
        if not hasattr(config, name):
            continue
        if isinstance(value, bool):
            if "bias" in name and not value:
                yield name, True
            continue
        for old, new in sorted(pairs):
            if value == old or (value is None and name in DERIVED):
                yield name, new
            elif isinstance(value, int) and "head" in name and value > 0 and old % value == 0:
                width = old // value
                if new % width == 0:
                    yield name, new // width


def _shapes(module: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _misfits(kind: type[torch.nn.Module], config: Any, now: Shapes) -> list[str]:
    """The tensors that a model of this config would not have, or have in another shape."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            theirs = _shapes(kind(copy.deepcopy(config)))
    except Exception:  # architectures raise many errors for widths that do not fit together
        return sorted(now)
    return [name for name in now if theirs.get(name) != now[name]]
