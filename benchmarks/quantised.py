"""Reducing and quantising: lower the float model, then quantise it; or quantise it first, then lower the integers.

python -m benchmarks.quantised [--quick] [--json OUT] [--threads N]

onnxruntime's own tool quantises. Beside it stands a net that was built and trained at the small widths, quantised likewise.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import cmrc
from benchmarks import data
from benchmarks.latency import quiet_exporters
from benchmarks.measure import ROOT, arguments, console, use_threads, write_record
from benchmarks.section import Record, Section, table
from benchmarks.trained import fit

SHARE = 0.5  # of the multiply-adds
SEEN = 400  # pictures that the quantiser sees
CALIBRATED = 2000


@dataclass(frozen=True)
class Net:
    """A trained classifier as a file, with its data; `native` trains one of other widths from nothing."""

    name: str
    file: Path
    train: np.ndarray
    test: np.ndarray
    labels: np.ndarray
    native: Path | None = None


class ConvNet(nn.Module):
    def __init__(self, first: int = 16, second: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(49 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(x)
        return logits


def trained(net: nn.Module, x: np.ndarray, labels: np.ndarray, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    return fit(net, x, labels, epochs, rate=2e-3, batch=64)


def exported(net: nn.Module, path: Path) -> Path:
    given = {"x": {0: torch.export.Dim("batch")}}
    torch.onnx.export(
        net,
        (torch.zeros(2, 1, 28, 28),),
        path,
        dynamo=True,
        dynamic_shapes=given,
        input_names=["x"],
        verbose=False,
        external_data=False,
    )
    return path


def nets(folder: Path, quick: bool) -> Iterator[Net]:
    examples = ROOT / "examples"
    train, test = (np.load(examples / f"digits_{part}.npz") for part in ("train", "test"))
    yield Net(
        "digits (8x8), the example's net", examples / "digits.onnx", train["images"], test["images"], test["labels"]
    )
    mnist = data.mnist()
    count = 1000 if quick else 30000
    x, y = mnist.train[:count].reshape(-1, 1, 28, 28), mnist.train_labels[:count]
    tests = mnist.test[: count // 3].reshape(-1, 1, 28, 28)
    torch.manual_seed(0)
    epochs = 1 if quick else 2
    whole = exported(trained(ConvNet(), x, y, epochs), folder / "mnist.onnx")
    widths = widths_of(lowered(whole, x, folder / "widths.onnx"))
    torch.manual_seed(0)
    native = exported(trained(ConvNet(*widths), x, y, epochs), folder / "native.onnx")
    yield Net("MNIST, a ConvNet", whole, x, tests, mnist.test_labels[: count // 3], native)


def lowered(path: Path, pictures: np.ndarray, to: Path) -> Path:
    """At half of the multiply-adds, by the default plan."""
    program = cmrc.trace(path)
    name = program.graph.inputs[0].name
    batches = [{name: part} for part in np.array_split(pictures[:CALIBRATED], 8)]
    sized = cmrc.Program(program.host.with_sizes({name: batches[0][name][:1].shape}))
    plan = cmrc.plan(sized, data=batches, budget={"of": "macs", "amount": SHARE})
    cmrc.lower(program, cmrc.Plan(program, plan.entries)).save(to)
    return to


def widths_of(path: Path) -> list[int]:
    """Of every layer but the last, in order."""
    nodes = [node for node in cmrc.trace(path).graph.nodes if node.op in ("conv", "linear")]
    return [int(node.output.shape[1]) for node in nodes[:-1]]


# ---------------------------------------------------------------- quantisation


def statically(path: Path, pictures: np.ndarray, to: Path) -> Path:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_static,
    )

    ready = to.with_suffix(".ready.onnx")
    quant_pre_process(path, ready, skip_symbolic_shape=True)
    name = onnx.load(ready).graph.input[0].name

    class Pictures(CalibrationDataReader):
        left = iter([{name: part} for part in np.array_split(pictures[:SEEN], 8)])

        def get_next(self) -> Any:
            return next(self.left, None)

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(ready, to, Pictures(), quant_format=QuantFormat.QDQ, per_channel=True, **types)
    return to


def dynamically(path: Path, to: Path) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    bare = onnx.load(path)
    del bare.graph.value_info[:]  # the tool turns weights around, and trips over the shapes that were declared for them
    onnx.save(bare, to.with_suffix(".bare.onnx"))
    quantize_dynamic(to.with_suffix(".bare.onnx"), to, op_types_to_quantize=["Gemm", "MatMul"])
    return to


def measured(files: Mapping[str, Path], net: Net) -> list[dict[str, Any]]:
    """Accuracy, agreement with the float net, size, and the ops that onnxruntime makes of the file."""
    rows = []
    whole = answers(files["whole float"], net.test)
    for name, path in files.items():
        answered = answers(path, net.test)
        rows.append({
            "name": name, "accuracy": float((answered == net.labels).mean()), "agreement": float((answered == whole).mean()),
            "bytes": path.stat().st_size, "integers": in_integers(path),
        })  # fmt: skip
        console.print(rows[-1])
    return rows


def answers(path: Path, pictures: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: part})[0].argmax(-1) for part in np.array_split(pictures, 10)])


def in_integers(path: Path) -> str:
    """How many of the convolutions and products onnxruntime runs on integers."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(path, options)
        ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    whole = sum(
        op in ("QLinearConv", "QGemm", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat") for op in ops
    )
    return f"{whole} of {whole + sum(op in ('Conv', 'FusedConv', 'Gemm', 'FusedGemm', 'MatMul') for op in ops)}"


def roads(net: Net, folder: Path) -> list[dict[str, Any]]:
    files: dict[str, Path] = {}
    small = lowered(net.file, net.train, folder / "small.onnx")
    sources = {"whole": net.file, "lowered": small, **({"native small": net.native} if net.native else {})}
    for name, path in sources.items():
        files[f"{name} float"] = path
        files[f"{name}, then static int8"] = statically(path, net.train, folder / f"{name}.static.onnx")
        files[f"{name}, then dynamic int8"] = dynamically(path, folder / f"{name}.dynamic.onnx")
    first = files["whole, then static int8"]
    files["static int8, then lowered"] = lowered(first, net.train, folder / "after.onnx")
    return measured(files, net)


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    parts = []
    for net in record["nets"]:
        rows = [
            (r["name"], f"{r['accuracy']:.4f}", f"{r['agreement']:.4f}", f"{r['bytes']:,}", r["integers"]) for r in net["rows"]
        ]  # fmt: skip
        head = ("", "accuracy", "agrees with the whole float net", "bytes", "ops on integers")
        parts.append(f"{net['name']}, {net['tests']} test pictures:\n\n" + table(head, rows))
    return "\n".join(parts)


SECTIONS = (
    Section(
        "quantised",
        "Reducing and quantising",
        """Both roads to a small net of integers: the float net lowered to {share:.0%} of its multiply-adds by the default plan and then quantised by
onnxruntime's own tool (static: QDQ, uint8 activations, int8 weights per channel, {seen} pictures; dynamic: its linear layers), and the
static int8 net lowered to as much, where units become constants in whole numbers. *Native small* is a net of the lowered one's widths that was
trained from nothing for as long as the whole one. The last column counts convolutions and products in what onnxruntime makes of the file.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "quantised.json")
    use_threads(options.threads)
    quiet_exporters()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for net in nets(folder, options.quick):
            console.print(net.name)
            rows.append({"name": net.name, "tests": len(net.test), "rows": roads(net, folder)})
    write_record(options.json, "quantised", [], options, nets=rows, share=SHARE, seen=SEEN)


if __name__ == "__main__":
    main()
