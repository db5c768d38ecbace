"""Attention heads of SmolLM2-135M: one in three of every group that shares keys and values, at all 30 layers, without fine-tuning.

python -m benchmarks.heads [--quick] [--json OUT]

Heads become their means, chosen by what their variation does to the output projection; or zeros, chosen by the norm of the
projection's weights, which is what a pruner does. `--quick` takes two layers with random weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import cmrc
from benchmarks import subjects, weights
from benchmarks.charts import OURS, PEER
from benchmarks.measure import Resumed, arguments, console, use_threads, write_record
from benchmarks.pretrained import body, draw
from benchmarks.pruners import sizes_of_module
from benchmarks.section import Section, claim
from benchmarks.subjects import Run, Subject, torch_run

if TYPE_CHECKING:
    from cmrc.ir.graph import Array

SHARED = 3  # query heads to one of keys and values
Scores = Mapping[str, "Array"]


def weakest(scores: Array) -> list[int]:
    """The head of the least score in every group."""
    return [SHARED * group + int(row.argmin()) for group, row in enumerate(scores.reshape(-1, SHARED))]


def attention_sites(program: cmrc.Program) -> list[str]:
    return [node.output.name for node in program.graph.nodes if node.op == "attention"]


def by_logit(program: cmrc.Program, stats: cmrc.Stats, sites: list[str]) -> dict[str, Array]:
    """What setting each head to its mean does to the output projection."""
    plan = cmrc.plan(program, stats, preset="cmr-logit", sites=sites, keep=0.5)
    return {site: np.asarray(plan.scores[site]) for site in sites}


def by_norm(model: nn.Module, sites: list[str]) -> dict[str, Array]:
    """The norm of the weights that read each head."""
    layers = [module.o_proj.weight for name, module in model.named_modules() if name.endswith("self_attn")]
    norms = {}
    for site, weight in zip(sites, layers, strict=True):
        blocks = weight.detach().double().numpy().reshape(weight.shape[0], -1, 64)
        norms[site] = np.linalg.norm(blocks, axis=(0, 2))
    return norms


def plan_of(program: cmrc.Program, scores: Scores, value: Callable[[str, list[int]], Any]) -> cmrc.Plan:
    plan = cmrc.Plan(program)
    for site, values in scores.items():
        heads = weakest(values)
        plan.do(site, units=heads, constant=value(site, heads))
    return plan


def torch_pruned(model: nn.Module, example: tuple[torch.Tensor, ...], scores: Scores) -> nn.Module:
    """Torch-Pruning on the queries of the same heads that the norm chooses, with what it couples to them."""
    import torch_pruning as tp

    model = copy.deepcopy(model)
    graph = tp.DependencyGraph().build_dependency(model, example_inputs=example)
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for layer, values in zip(layers, scores.values(), strict=True):
        columns = [64 * head + i for head in weakest(values) for i in range(64)]
        graph.get_pruning_group(layer.q_proj, tp.prune_linear_out_channels, idxs=columns).prune()
    return model.eval()


def stand_in() -> Subject:
    model = weights.smollm_module(64, 2)
    ids = np.random.default_rng(0).integers(0, 1000, (2, 16))
    plain = torch_run(model)(ids)

    def judge(run: Run) -> dict[str, float]:
        return {"KL": subjects.divergence(plain, run(ids))}

    return Subject("stand-in", "random weights", model, (), [{"ids": ids}], judge)


def measure(subject: Subject, resumed: Resumed) -> dict[str, Any]:
    assert isinstance(subject.model, nn.Module)
    program, model, example = subject.program, subject.model, subject.example
    sites = attention_sites(program)
    begin = time.perf_counter()
    stats = cmrc.calibrate(program, subject.batches, sites=sites, need=("scatter",))
    calibrated = time.perf_counter() - begin

    def means(site: str, heads: list[int]) -> Array:
        mean_values: Array = np.asarray(stats[site].columns.by_unit(stats[site].mean))[heads]
        return mean_values

    def lowered(name: str, kind: str, scores: Scores, value: Callable[[str, list[int]], Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        module = cmrc.lower(program, plan_of(program, scores, value)).module.eval()
        seconds = {"calibrate": calibrated, "plan and lower": time.perf_counter() - begin}
        return {"method": name, "kind": kind, "seconds": seconds, **sizes_of_module(module, example),
                **subject.judge(torch_run(module))}  # fmt: skip

    def peer() -> dict[str, Any]:
        begin, row = time.perf_counter(), {"method": "Torch-Pruning, queries of those heads", "kind": PEER}
        try:
            pruned = torch_pruned(model, example, norm)
            row |= {"seconds": {"prune": time.perf_counter() - begin}, **sizes_of_module(pruned, example)}
            return {**row, **subject.judge(torch_run(pruned))}
        except Exception as error:  # whatever it raises is reported
            whole = {"parameters": 0, "macs": 0, "seconds": {"prune": time.perf_counter() - begin}}
            return {**whole, **row, "onnx": f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"}

    logit, norm = by_logit(program, stats, sites), by_norm(model, sites)
    rows = [
        resumed("means", lambda: lowered("CMR-Logit, means", OURS, logit, means)),
        resumed("norm", lambda: lowered("norm, means", OURS, norm, means)),
        resumed("zeros", lambda: lowered("norm, zeros (what a pruner does)", PEER, norm, lambda site, heads: 0.0)),
        resumed("peer", peer),
    ]
    console.print(rows)
    whole = resumed("whole", lambda: {**sizes_of_module(model, example), **subject.judge(torch_run(model))})
    number = next(key for key in whole if key not in ("parameters", "macs"))
    ours, zeros = (rows[i][number] - whole[number] for i in (0, 2))
    claims = [claim(f"{number} lost, means by CMR-Logit over zeros by the norm", ours / zeros, "<", 1.0)]
    return {"name": subject.name, "setting": subject.what, "number": number, "whole": whole, "rows": rows,
            "exports": {}, "claims": claims}  # fmt: skip


NOTE = """{name}: {setting}. No fine-tuning. Torch-Pruning is asked for the queries of the heads that the norm chooses; it takes one of
the three heads of keys and values along, although queries that read it stay, and the queries that are left meet others than theirs: no error.
"""
SECTIONS = (Section("heads", "SmolLM2-135M: attention heads", NOTE, body, draw, (), (8.0, 2.4)),)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "heads.json")
    use_threads(options.threads)
    resumed = Resumed(options.json)
    if options.quick:
        subject = stand_in()
    else:
        given = subjects.smollm(count=12, tests=6)
        what = given.what.partition("; ")[2]
        subject = replace(
            given, what=f"3 of 9 query heads of 30 layers, one of every group that shares keys and values; {what}"
        )
    measurements = measure(subject, resumed)
    write_record(options.json, "heads", [], options, **measurements, wall_seconds=resumed.seconds)
    resumed.forget()


if __name__ == "__main__":
    main()
