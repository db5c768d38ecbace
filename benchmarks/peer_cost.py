"""Lowering beside Torch-Pruning's graph build and prune, on architectures at sizes that people deploy.

python -m benchmarks.peer_cost [--quick] [--threads N]

The architectures are those of the zoo (`tests/zoo`), at a published size in place of the small one, and so are the requests: half
of the inner units, a third of the heads. Torch-Pruning gets the same units of the same layers. It knows no constants but zero, so
that is what both are asked for: its time says something only where its answer equals the model with those units at zero. Beside it
stands the time of the zoo's own request, which replaces the units by constants.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cmrc
from benchmarks.measure import ROOT, Resumed, arguments, console, from_pairs, show, use_threads, write_record
from benchmarks.section import COLOURS, Record, Section, claim, claims, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

sys.path[:0] = [str(ROOT / "tests" / "zoo"), str(ROOT / "tests")]
TARGET = 0.5
PATIENCE = 15.0  # seconds of processor time for one of Torch-Pruning's answers
REQUESTS = ("inner units", "heads")

TINY = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
BASE = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 1024}
PICTURE = {**TINY, "image_size": 224, "patch_size": 16}
TEXT = {**BASE, "vocab_size": 8000, "max_position_embeddings": 130}
LLM = {**BASE, "num_key_value_heads": 2, "vocab_size": 8000, "max_position_embeddings": 128}
TWO_SIDED = {
    "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 8000,
}  # fmt: skip
# Options that take the place of the zoo's: what the models of these names are published with, or close to it.
SIZES: dict[str, dict[str, Any]] = {
    "vit": PICTURE, "deit": PICTURE, "beit": PICTURE, "clip": {**PICTURE, "projection_dim": 128},
    "swin": {"image_size": 224, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7},
    "convnext": {}, "resnet": {}, "mobilenet_v2": {}, "segformer": {},
    "bert": TEXT, "roberta": TEXT, "electra": {**TEXT, "embedding_size": 128}, "mpnet": TEXT,
    "distilbert": {"dim": 256, "n_layers": 6, "n_heads": 4, "hidden_dim": 1024, "vocab_size": 8000},
    "opt": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "ffn_dim": 1024, "vocab_size": 8000,
            "max_position_embeddings": 128, "word_embed_proj_dim": 256},
    "gpt_neox": TEXT, "llama": LLM, "mistral": LLM, "qwen2": LLM, "qwen3": LLM,
    "bart": {**TWO_SIDED, "max_position_embeddings": 130},
    "t5": {"d_model": 512, "d_ff": 1024, "num_layers": 6, "num_heads": 8, "d_kv": 64, "vocab_size": 8000, "feed_forward_proj": "gated-gelu"},
    "timm_deit": {"img_size": 224, "patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "timm_convnext": {}, "timm_efficientnet": {}, "timm_mobilenetv3": {}, "timm_resnet50": {},
    "tv_resnext50": {}, "tv_regnet_x": {}, "tv_mnasnet": {}, "tv_inception_v3": {}, "tv_googlenet": {}, "tv_squeezenet": {},
    "tv_densenet": {"growth_rate": 32, "block_config": (6, 12, 24, 16), "num_init_features": 64},
}  # fmt: skip
QUICK = ("vit", "resnet")


def sized(name: str, options: dict[str, Any]) -> Any:
    """The zoo's model of this name at another size."""
    from models import FromConfig, entries, image, tokens
    from vision import FromLibrary

    entry = entries()[name]
    build = entry.build
    pictures = any(value.dim() == 4 for value in entry.inputs(1).values())
    inputs: Callable[[int], dict[str, torch.Tensor]] = image(224)
    if isinstance(build, FromConfig):
        kept = {k: v for k, v in build.options.items() if k in ("experts_implementation", "head_dim") and k in options}
        build = replace(build, options={**kept, **options})
        if not pictures:
            inputs = tokens(64, 8000, **{extra: 16 for extra in build.names if extra != "input_ids"})
    else:
        assert isinstance(build, FromLibrary)
        options_known = dict(build.options)
        fixed = ("model_name", "num_classes", "aux_logits", "init_weights")
        build = replace(
            build, options=tuple({**{k: v for k, v in options_known.items() if k in fixed}, **options}.items())
        )
    return replace(entry, build=build, inputs=inputs)


def measure(name: str, request: str, subject: Any, pairs: int) -> dict[str, Any] | None:
    """Seconds of both, alternating, and whether Torch-Pruning's answer is right; None where there is nothing to ask."""
    import peer

    program, constants = subject.program, subject.plan("torch", request)
    if not len(constants):
        return None
    asked, unnamed = peer.layers_for(program, constants)
    if unnamed:
        return {"verdict": "no way", "detail": unnamed}
    try:
        compared = peer.side_by_side(subject, constants, asked, pairs, PATIENCE)
    except cmrc.CmrcError as error:
        return {"verdict": "declined", "detail": str(error)[:200]}
    if compared.error:
        return {"verdict": "error", "detail": compared.error[:160]}
    verdict, detail, gap = peer.judged(subject, peer.silent(program, constants), compared.model, subject.inputs(2))
    if gap > peer.EQUAL:
        detail = f"by {gap:.0%} of the output's scale"
    return {
        "verdict": verdict, "detail": detail or compared.problem, "seconds": compared.seconds, "nodes": len(program.graph.nodes),
        "parts": compared.lowered.seconds, "parameters": sum(p.numel() for p in subject.built.parameters()),
    }  # fmt: skip


# ---------------------------------------------------------------- the page


def body(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        cells = [row["model"], row["request"], f"{row['nodes']}" if "nodes" in row else ""]
        if "ratio" in row:
            r = row["ratio"]
            cells += [show(r["ours_seconds"]), show(row["assembled"]), show(r["theirs_seconds"]), row["verdict"]]
            cells += [f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})", f"{row['constants']:.2f}"]
        else:
            cells += ["", "", "", row["verdict"], "", ""]
        rows.append(cells)
    head = (
        "model",
        "request",
        "nodes",
        "lower",
        "and as a module",
        "Torch-Pruning",
        "its answer",
        "lower / Torch-Pruning",
        "to constants / Torch-Pruning",
    )
    shares = record["shares"]
    caption = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return "\n".join(
        (claims(record["claims"]), table(head, rows), f"Lowering spends its time in: {caption}.\n", refusals(record))
    )


def refusals(record: Record) -> str:
    """What Torch-Pruning says where it has no answer."""
    lines = [
        f"- {row['model']}, {row['request']}: {row['verdict']}: {row['detail']}"
        for row in record["rows"]
        if row["verdict"] != "equal" and row["detail"]
    ]
    return "\n".join(lines) + "\n" if lines else ""


def draw(record: Record, figure: Figure) -> None:
    rows = sorted((r for r in record["rows"] if "ratio" in r), key=lambda r: r["ratio"]["ratio"])
    axes = figure.subplots()
    for i, row in enumerate(rows):
        r, right = row["ratio"], row["verdict"] == "equal"
        colour = COLOURS[0] if right else COLOURS[1]
        axes.errorbar(
            r["ratio"],
            i,
            xerr=[[r["ratio"] - r["low"]], [r["high"] - r["ratio"]]],
            fmt="o" if right else "x",
            color=colour,
        )
    axes.axvline(TARGET, color=COLOURS[6], linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{r['model']}, {r['request']}" for r in rows], fontsize=7)
    axes.set(
        xlabel="lowering / Torch-Pruning, time (dashed: target; ×: its answer is not right)",
        xscale="log",
    )
    axes.margins(y=0.01)


SECTIONS = (
    Section(
        "peer_cost",
        "Lowering beside Torch-Pruning, architecture by architecture",
        "The zoo's architectures at sizes that people deploy (random weights): half of the inner units, or a third of the heads, at "
        "once. Processor time of `cmrc.lower` on a traced program, and of assembling the module from it, against Torch-Pruning's graph "
        "build and prune of the same units, alternating in one process; tracing is left out. Torch-Pruning can only set units to zero, "
        "so both do that; the last column has the time that constants other than zero take, which are folded into biases, against its "
        "zeros. The target of one half holds where Torch-Pruning's answer is *equal* to the model with those units at zero; *wrong*, "
        "*nothing* and *error* are no answers, and *no way* means that no layer of the module has the asked units for its outputs.\n",
        body,
        draw,
        size=(8.0, 8.5),
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "peer_cost.json")
    use_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from asking import Subject

    resumed, pairs = Resumed(options.json), 2 if options.quick else 5
    chosen = {name: SIZES[name] for name in (QUICK if options.quick else SIZES)}
    rows = []
    for i, (name, sizes) in enumerate(chosen.items(), start=1):

        def ask(name: str = name, sizes: dict[str, Any] = sizes) -> dict[str, Any]:
            from models import entries

            subject = Subject.of(entries()[name] if options.quick else sized(name, sizes))
            return {request: measure(name, request, subject, pairs) for request in REQUESTS}

        for request, answer in resumed(name, ask).items():
            if answer is None:
                continue
            row = {"model": name, "request": request, **{k: v for k, v in answer.items() if k != "seconds"}}
            if "seconds" in answer:
                seconds = np.array(answer["seconds"])
                ratio = from_pairs(f"{name}, {request}", "lower", "graph + prune", seconds[:, :2])
                row |= {
                    "ratio": {k: getattr(ratio, k) for k in ("ratio", "low", "high", "ours_seconds", "theirs_seconds")}
                }
                row["constants"] = float(np.median(seconds[:, 2] / seconds[:, 1]))
                row["assembled"] = float(np.median(seconds[:, 3]))
            rows.append(row)
            text = f"{row['ratio']['ratio']:.2f}" if "ratio" in row else row["detail"]
            console.print(f"{i} of {len(chosen)}: {name}, {request}: {row['verdict']} {text}", highlight=False)
    right = [row for row in rows if row["verdict"] == "equal"]
    worst = max(right, key=lambda row: row["ratio"]["ratio"])
    total = math.fsum(row["parts"]["total"] for row in rows if "parts" in row)
    names = [name for name in right[0]["parts"] if name != "total"]
    shares = {name: math.fsum(r["parts"][name] for r in rows if "parts" in r) / total for name in names}
    judged = [
        claim(f"slowest, beside a right answer of Torch-Pruning ({worst['model']}, {worst['request']})",
              worst["ratio"]["ratio"], "<=", TARGET),
        claim("share of the rows with a right answer of Torch-Pruning that meet it",
              float(np.mean([row["ratio"]["ratio"] <= TARGET for row in right])), ">=", 1.0),
        claim("the same share, constants of ours against its zeros",
              float(np.mean([row["constants"] <= TARGET for row in right])), ">=", 1.0),
    ]  # fmt: skip
    write_record(
        options.json,
        "peer cost",
        [],
        options,
        rows=rows,
        shares=shares,
        claims=judged,
        wall_seconds=round(resumed.seconds, 1),
    )
    resumed.forget()


if __name__ == "__main__":
    main()
