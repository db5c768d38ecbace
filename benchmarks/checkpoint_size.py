"""Hugging Face checkpoints of one and of seven billion parameters, folder to folder, in little memory.

python -m benchmarks.checkpoint_size [--model 7b] [--quick] [--json OUT] [--folder FOLDER]

A Llama with random bfloat16 weights is written to FOLDER/checkpoint, a file per layer. A process of its own traces, plans, lowers
and saves it: every FFN and the heads of every layer to three quarters. Its time stands beside that of copying the result's
files. At the end torch runs single layers of the result, and of the original with hooks that clamp the replaced units.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import cmrc
import cmrc.hosts.fx.checkpoint  # so that the memory before counts all code
from benchmarks import llama, llm_size
from benchmarks.llm_size import TIME, Watch, copy_seconds, lower_in_stages, status
from benchmarks.measure import console, parser, show, use_threads, write_record
from benchmarks.section import Record, Section, megabytes, table, verdict
from cmrc.hosts.fx.modeling_cmrc import load

CONSTANT = 200 << 20  # bytes beside weights: the traced program, plan, report, buffers
DTYPE = torch.bfloat16
TOKENS = (1, 8)


def write(folder: Path, config: llama.Config) -> None:
    """config.json and a file of random weights per layer; no more than one layer is in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    settings = LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.served,
        vocab_size=config.vocabulary,
        max_position_embeddings=config.positions,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    settings.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in LlamaForCausalLM(settings).state_dict().items()}
    random = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: _random(shapes[name], random) for name in names}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, names in files.items() for name in names}
    size = sum(torch.Size(shape).numel() * DTYPE.itemsize for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return (1 + 0.1 * torch.randn(shape, generator=random)).to(DTYPE)
    return (torch.randn(shape, generator=random) * shape[-1] ** -0.5).to(DTYPE)


READERS = ("mlp.down_proj", "self_attn.o_proj")  # of the FFN's units, and of the heads


def plan_for(program: cmrc.Program, config: llama.Config) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    for layer in range(config.layers):
        for name, (units, constants) in zip(READERS, config.replaced(layer), strict=True):
            plan.do(f"model.layers.{layer}.{name}:input", units=units.tolist(), constant=constants)
    return plan


def lower(source: Path, target: Path, config: llama.Config) -> dict[str, Any]:
    """The steps from folder to folder; what they took."""
    watch, before = Watch(), status()["RssAnon"]
    size = lower_in_stages(source, target, lambda program: plan_for(program, config), watch)
    largest = config.width * config.ffn * DTYPE.itemsize
    grown, bound = size.pop("anonymous_peak") - before, 2 * largest + CONSTANT
    return {
        **size,
        "weights_bytes": sum(file.stat().st_size for file in source.glob("*.safetensors")),
        "largest_changed_bytes": largest,
        "before_bytes": before,
        "grown_bytes": grown,
        "bound_bytes": bound,
        "met": grown <= bound,
    }


# ---------------------------------------------------------------- single layers


def differences(source: Path, target: Path, config: llama.Config) -> list[dict[str, Any]]:
    """How far lowered layers are from clamped ones, at the start, in the middle and at the end."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn((*TOKENS, config.width), generator=random)
    original, lowered = load(source), load(target)
    rows = []
    for layer in sorted({0, config.layers // 2, config.layers - 1}):
        plain = _layer(original, layer, hidden)
        clamped = _layer(original, layer, hidden, config.replaced(layer))
        smaller = _layer(lowered, layer, hidden)
        scale = clamped.abs().max()
        error, moved = (float((values - clamped).abs().max() / scale) for values in (smaller, plain))
        rows.append({"layer": layer, "error": error, "moved": moved})
    return rows


Clamp = tuple[np.ndarray, np.ndarray]  # units, constants


@torch.no_grad()
def _layer(model: Any, index: int, hidden: torch.Tensor, clamps: tuple[Clamp, ...] = ()) -> torch.Tensor:
    """What one layer gives, computed in float64: what differs then is the rounding of the new biases to the model's type."""
    layer: Any = copy.deepcopy(model.model.layers[index]).double()
    for name, clamp in zip(READERS, clamps, strict=False):
        layer.get_submodule(name).register_forward_pre_hook(_setting(*clamp))
    positions = torch.arange(hidden.shape[1])[None]
    rotary = model.model.rotary_emb(hidden, positions)
    values = layer(hidden.double(), position_embeddings=tuple(part.double() for part in rotary), attention_mask=None)
    return values[0] if isinstance(values, tuple) else values


def _setting(units: np.ndarray, constants: np.ndarray) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], Any]:
    def hook(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        values = given[0].clone()
        values[..., units] = torch.from_numpy(constants)
        return (values,)

    return hook


# ---------------------------------------------------------------- the command


def child(step: str, source: Path, target: Path, config: llama.Config, out: Path) -> Any:
    given = [step, str(source), str(target), json.dumps(asdict(config)), str(out)]
    subprocess.run([sys.executable, "-m", "benchmarks.checkpoint_size", "--child", *given], check=True)
    return json.loads(out.read_text())


def body(record: Record) -> str:
    size = record["size"]
    times = f"{show(record['wall_seconds'])}, {show(record['copy_seconds'])}"
    numbers = (
        ("parameters", f"{size['parameters']:,} to {size['parameters_after']:,}"),
        ("weights", f"{megabytes(size['weights_bytes'])} of bfloat16"),
        ("largest weight that changes", megabytes(size["largest_changed_bytes"])),
        ("own memory after the imports", megabytes(size["before_bytes"])),
        ("own memory beyond that, at most", megabytes(size["grown_bytes"])),
        ("allowed: twice the largest weight that changes and a constant", megabytes(size["bound_bytes"])),
        ("met", verdict(size["met"])),
        ("the whole process, and copying the files of the result", times),
        ("processor time of the whole process, its imports included", show(record["processor_seconds"])),
        ("ratio, and the target", f"{record['time_ratio']:.2f}, ≤ {TIME} {verdict(record['time_ratio'] <= TIME)}"),
        ("how the result is loaded", record["loader"]),
    )
    stages = [
        (name, show(stage["seconds"]), megabytes(stage["anonymous"]), megabytes(stage["total"]))
        for name, stage in size["stages"].items()
    ]
    layers = [(str(row["layer"]), f"{row['error']:.1e}", f"{row['moved']:.1e}") for row in record["differences"]]
    return "\n".join(
        (
            table(("what", ""), numbers),
            table(("step", "time", "own memory", "with mapped files"), stages),
            table(("layer", "lowered and clamped differ by", "the replacement itself moves the values by"), layers),
        )
    )


TEXT = """A Llama with random bfloat16 weights in a folder as `save_pretrained` writes it, a file per layer; every FFN and the heads of
every layer to three quarters, folder to folder. *own* memory is anonymous, *with mapped files* counts the pages of the weight
files that are mapped at that moment, which the kernel may drop at will. Differences are shares of the largest value that a
layer gives, computed in float64 by the model's own code: what is left is the rounding of the new biases to bfloat16.
"""
SECTIONS = tuple(
    Section(f"checkpoint_size_{name}", f"A checkpoint of {words} parameters", TEXT, body, arguments=("--model", name))
    for name, words in (("1b", "1.1 billion"), ("7b", "seven billion"))
)


def main() -> None:
    arguments = parser("Checkpoint folders of billions of parameters in little memory.", "checkpoint_size_{model}.json")
    arguments.add_argument("--model", choices=list(llm_size.MODELS), default="1b", help="which sizes")
    arguments.add_argument("--folder", type=Path, help="where the folders go, and stay; else a temporary folder")
    arguments.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    use_threads(options.threads)
    if options.child:
        step, source, target, sizes, out = options.child
        function = lower if step == "lower" else differences
        Path(out).write_text(json.dumps(function(Path(source), Path(target), llama.Config(**json.loads(sizes)))))
        return
    config = llm_size.SMALL if options.quick else replace(llm_size.MODELS[options.model], dtype="float32")
    with tempfile.TemporaryDirectory(prefix="cmrc-") as temporary:
        folder = options.folder or Path(temporary)
        source, target, out = folder / "checkpoint", folder / "smaller", folder / "size.json"
        for old in (source, target):
            shutil.rmtree(old, ignore_errors=True)
        console.print("writing ...")
        write(source, config)
        console.print("lowering ...")
        os.sync()
        start, before = time.perf_counter(), os.times()
        size = child("lower", source, target, config, out)
        wall, after = time.perf_counter() - start, os.times()
        spent = sum(after[2:4]) - sum(before[2:4])  # of ended children, for the user and in the system
        copied = copy_seconds(list(target.iterdir()), folder)
        console.print("running layers ...")
        rows = child("differences", source, target, config, out)
        loader = "modeling_cmrc.py" if (target / "modeling_cmrc.py").exists() else "from_pretrained"
    write_record(
        options.json,
        "checkpoint size",
        [],
        options,
        config=asdict(config),
        size=size,
        wall_seconds=wall,
        processor_seconds=spent,
        copy_seconds=copied,
        time_ratio=wall / copied,
        differences=rows,
        loader=loader,
    )


if __name__ == "__main__":
    main()
