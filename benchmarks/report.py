"""Write docs/benchmarks.md from the records: every number on that page comes from there.

python -m benchmarks.report [--records FOLDER] [--out PAGE] [--check]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RECORDS, ROOT, show

INTRODUCTION = """# Benchmarks

Written by `python -m benchmarks.report` from `benchmarks/records/`. `bash benchmarks/run.sh` measures again and writes
this page anew; `--quick` only shows that everything runs.

A ratio is ours over theirs, so below 1 means that cmrc takes less time. Both sides run in one process, one right after
the other, in alternating order; the ratio is the median over the pairs, in brackets its 95 % bootstrap interval (for
latency over whole sessions, whose pairs are not independent). The times beside it are medians too and belong to the
machine; compare ratios.
"""

SECTIONS = {
    "compile cost": """## What lowering costs

{model}: half of the units of every FFN are replaced by constants. Torch-Pruning and onnxsim remove the same number of
units (they can only set them to zero), and the resulting shapes are checked to be the same. The first row starts from a
traced program and a plan file, and includes reading the plan, the fingerprint of all weights and the checks. The second
has the plan in memory, made for this very program; the third stops before the `fx.GraphModule` is assembled, which
runs the code that the trace generated, since only parameters differ. The next rows add reading the exported graph, then
`torch.export` itself, to the first.
""",
    "latency": """## How fast the result runs

Half of the units of every site replaced, run by onnxruntime on the CPU with {threads} intra-op thread(s).
The clock is the {clock}.
*native* is the small architecture written by hand and exported by torch; *lowered (torch)* comes from the `nn.Module`,
*lowered (onnx)* from the exported file of the wide model.
""",
    "llm size": """## What a large model takes

A Llama-architecture ONNX model with random weights in an external data file, every FFN to three quarters, ONNX file to
ONNX file. The process may allocate only twice the largest weight that changes and a constant beyond what it holds after
its imports: the kernel enforces it. *own* memory is anonymous, *with mapped files* counts the pages of the data file that
are mapped at that moment, one weight at a time, which the kernel may drop at will.
""",
    "depth": """## How the cost grows with depth

Narrow models of growing depth: DeiT-like on the torch host (half of every FFN), Llama-like on the ONNX host (a quarter of
every FFN). Medians of the CPU time of the thread; the exponent is the slope of log time over log nodes, and up to {linear} counts
as linear.
""",
    "calibration": """## What calibrating, selecting and fitting cost

Means and variances of every FFN site against the forward pass alone, and affine maps by one factorisation against one
for each unit.
""",
    "selection": """## What selection and replacement do to trained networks

No fine-tuning anywhere. The networks are small and trained here on MNIST and CIFAR-10 (`benchmarks/trained.py`).
""",
    "interventions": """## Interventions beside other libraries

R swaps of random units at one site, bases and sources drawn from R/2 inputs (R = 2000, for the ViT 16), by processor time. The peers
run the model on the sources, then on the bases, as their documentation shows; *hooks, sources once* is the best that hooks can do
by hand. Each target of 1.05 is for the fastest of them at that site.
""",
    "verification, boolean": """## The paper's Boolean circuit

XOR(AND(x1, x2), OR(x3, x4)), MLP 8-64-64-2, penultimate layer, six seeds, 2000 swaps at rate 0.5; means and standard
deviations over seeds, the paper's means below. *cwvar* ranks by the score of CMR-Const and folds means, *CMR-Const* folds c*.
""",
    "verification, mnist": """## The paper's MNIST network

MLP 784-512-512-10 trained on all of MNIST, penultimate layer, ten seeds, 2000 swaps at rate 0.5 on the test set. The level of the
IIA depends on how the networks were trained, which the paper does not say; the order of the methods is what can be compared.
""",
    "coverage": """## How often the bounds hold

200,000 swaps on the digits example are the population; {repetitions} times {swaps} of them are drawn, and each bound at δ = {delta} is compared with the
truth. *at any time*: the interval is looked at every 250 swaps and must hold at all looks together.
""",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def ratios(found: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for r in found:
        target, met = ("", "") if r["target"] is None else (f"≤ {r['target']:.3g}", "yes" if r["met"] else "**no**")
        sides = (f"{r['ours']} ({show(r['ours_seconds'])})", f"{r['theirs']} ({show(r['theirs_seconds'])})")
        interval = f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"
        rows.append((r["name"], *sides, interval, target, met, str(r["pairs"])))
    return table(("what", "ours", "theirs", "ratio", "target", "met", "pairs"), rows)


def spent(found: Mapping[str, float]) -> str:
    rows = [(name, show(seconds)) for name, seconds in found.items()]
    return "### Where the time of the first row goes\n\n" + table(("step", "median"), rows)


def memory(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (host, *(f"{told[key] / 1e6:.2f}" for key in ("shared_bytes", "new_bytes", "copied_bytes", "peak_bytes")),
         "yes" if told["met"] else "**no**")
        for host, told in found.items()
    ]  # fmt: skip
    head = (
        "host",
        "shared with the model",
        "new",
        "copied unchanged",
        "allocated at most",
        "no unchanged weight copied",
    )
    return "### Memory\n\nMegabytes of weights; the peak counts what Python and numpy allocate.\n\n" + table(head, rows)


def histograms(found: Mapping[str, Mapping[str, Mapping[str, int]]], same: Mapping[str, bool]) -> str:
    parts = ["### The ops that onnxruntime is left with\n\nAfter `ORT_ENABLE_EXTENDED`.\n"]
    for case, files in found.items():
        names = [name for name in files if name != "original"]
        ops = sorted({op for name in names for op in files[name]})
        verdict = "the same" if same[case] else "**not the same**"
        parts.append(f"{case}: lowered and native are {verdict}.\n")
        parts.append(table(("op", *names), ((op, *(str(files[name].get(op, 0)) for name in names)) for op in ops)))
    return "\n".join(parts)


def large(record: Mapping[str, Any]) -> str:
    found = record["size"]
    numbers = (
        ("parameters", f"{found['parameters']:,} to {found['parameters_after']:,}"),
        ("weights", megabytes(found["weights_bytes"])),
        ("largest weight that changes", megabytes(found["largest_changed_bytes"])),
        ("own memory after the imports", megabytes(found["before"]["anonymous"])),
        ("own memory beyond that, at most", megabytes(found["grown_bytes"])),
        ("allowed: twice the largest weight that changes and a constant", megabytes(found["bound_bytes"])),
        ("met", "yes" if found["met"] else "**no**"),
        ("all memory with mapped files, at most (ru_maxrss)", megabytes(found["resident_peak"])),
        ("lowered and clamped differ by", f"{found['error']:.1e} of the largest logit"),
        ("the replacement itself moves the logits by", f"{found['moved']:.1e}"),
    )
    stages = [
        (name, show(told["seconds"]), megabytes(told["anonymous"]), megabytes(told["total"]))
        for name, told in found["stages"].items()
    ]
    return table(("what", ""), numbers) + "\n" + table(("step", "time", "own memory", "with mapped files"), stages)


def growth(record: Mapping[str, Any]) -> str:
    parts = []
    for host, found in record["growth"].items():
        nodes = found["nodes"]
        rows = []
        for step, told in found["steps"].items():
            times = [show(told["seconds"][depth]) for depth in nodes]
            each = [told["seconds"][depth] / count for depth, count in nodes.items()]
            verdict = "yes" if told["met"] else "**no**"
            rows.append((step, *times, f"{show(each[0])} to {show(each[-1])}", f"{told['exponent']:.2f}", verdict))
        depths = [f"{depth} layers, {count} nodes" for depth, count in nodes.items()]
        parts.append(f"{host}:\n\n" + table(("step", *depths, "a node", "exponent", "linear"), rows))
    return "\n".join(parts)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def costs(memory: Mapping[str, Any], elimination: Mapping[str, Any]) -> str:
    """Memory of calibration and the time of joint selection."""
    held = ", ".join(f"{int(n) / 1e6:.1f} MB for {count} samples" for count, n in memory["samples to bytes"].items())
    verdict = "does not grow" if memory["met"] else "**grows**"
    return (
        f"The memory of calibration {verdict} with the data: {held}. Joint selection of {elimination['removed']} of "
        f"{elimination['units']} units took {elimination['processor seconds']:.1f} s of processor time.\n"
    )


COLUMNS = {
    "keep": "{}", "method": "{}", "folds": "{}", "accuracy": "{:.4f}", "kl": "{:.4f}", "d2": "{:.2f}", "error": "{:.3f}",
}  # fmt: skip
NETWORKS = {
    "mnist": "MLP 784-512-512-10 on MNIST, last hidden layer; d2 is the logit distortion under interchange (p = 0.5)",
    "resnet": "ResNet-8 on CIFAR-10, half of the inner channels of every block",
    "vit": "ViT on CIFAR-10, half of the units of every FFN",
}


def networks(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Every trained network: what was claimed, and all rows."""
    parts = []
    for name, told in found.items():
        parts.append(f"### {NETWORKS[name]}\n\nThe whole network: accuracy {told['baseline']:.4f}.\n")
        claims = [
            (c["name"], f"{c['value']:.4f}", f"{c['relation']} {c['target']:.4g}", "yes" if c["met"] else "**no**")
            for c in told["claims"]
        ]
        parts.append(table(("claim", "measured", "target", "met"), claims))
        head = [key for key in COLUMNS if key in told["rows"][0]]
        parts.append(table(head, [[COLUMNS[key].format(row[key]) for key in head] for row in told["rows"]]))
    return "\n".join(parts)


def work(found: Mapping[str, Mapping[str, Any]], cached: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(name for told in found.values() for name in told["flops"]))
    rows = [
        (site, *(f"{told['flops'][n] / told['least']:.2f}" if n in told["flops"] else "" for n in names))
        for site, told in found.items()
    ]
    met = "" if cached["met"] else " (**missed**)"
    return (
        "### Work, relative to the cut's least\n\nThe least is the prefix for each input and the rest for each swap, counted on the IR; "
        "the others by torch's flop counter.\n\n"
        + table(("site", *names), rows)
        + f"\n`cmrc.verify` takes {cached['milliseconds']:.1f} ms for 2000 swaps "
        f"on penultimate features that are held, 256 of 512 units retained; the target is {cached['target']:g} ms{met}.\n"
    )


def verified(rows: Iterable[Mapping[str, Any]], claims: Iterable[Mapping[str, Any]]) -> str:
    made = []
    for row in rows:
        ours = (f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in row["ours"].values())
        made.append((str(row["keep"]), row["score"], "ours", *ours))
        if row["paper"]:
            made.append(("", "", "paper", *(f"{number:.3f}" for number in row["paper"])))
    told = [
        f"- keep {c['keep']}, {c['better']} minus {c['worse']}, {c['number']}: {c['difference'][0]:.4f} "
        f"[{c['difference'][1]:.4f}, {c['difference'][2]:.4f}], {'as' if c['holds'] else '**not** as'} the paper claims"
        for c in claims
    ]
    head = ("keep", "score", "", "accuracy", "IIA", "KL")
    return table(head, made) + "\nPaired over seeds, with 95 % bootstrap intervals:\n\n" + "\n".join(told) + "\n"


def covered(cases: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (str(case["replaced"]), name, *(f"{case[key][name]:.4f}" if name in case[key] else "" for key in ("truth", "gap")), f"{100 * share:.1f} %")
        for case in cases
        for name, share in case["held"].items()
    ]  # fmt: skip
    return table(("units replaced, of 128", "bound", "truth", "estimate − bound, mean", "holds in"), rows)


def conditions(record: Mapping[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    quick = " A quick run: the numbers mean nothing." if record["quick"] else ""
    return (
        f"Measured {record['when']} at commit {record['commit']}: {machine['processor']}, {machine['cores']} cores "
        f"(load {machine['load']} at the end), {machine['system']}, {record.get('threads', 1)} thread(s), "
        f"Python {machine['python']}, {told}.{quick}\n"
    )


def page(records: Sequence[Mapping[str, Any]]) -> str:
    parts = [INTRODUCTION]
    judged = [r for record in records for r in record.get("ratios", ()) if r["met"] is not None]
    missed = [f"{r['name']}, {r['ours']} / {r['theirs']}: {r['ratio']:.3f}" for r in judged if not r["met"]]
    claims = [(n, c) for record in records for n, told in record.get("networks", {}).items() for c in told["claims"]]
    missed += [f"{NETWORKS[n]}: {c['name']}: {c['value']:.3f}" for n, c in claims if not c["met"]]
    judged += [c for _, c in claims]
    parts.append(f"{len(judged) - len(missed)} of {len(judged)} targets are met.\n")
    if missed:
        parts.append("Missed:\n\n" + "\n".join(f"- {line}" for line in missed) + "\n")
    for record in records:
        parts.append(SECTIONS[record["what"]].format(**record))
        parts.append(conditions(record))
        if record.get("ratios"):
            parts.append(ratios(record["ratios"]))
        if "size" in record:
            parts.append(large(record))
        if "growth" in record:
            parts.append(growth(record))
        if "parts" in record:
            parts.append(spent(record["parts"]))
        if "memory" in record:
            parts.append(memory(record["memory"]))
        if "elimination" in record:
            parts.append(costs(record["calibration_memory"], record["elimination"]))
        if "networks" in record:
            parts.append(networks(record["networks"]))
        if "work" in record:
            parts.append(work(record["work"], record["cached"]))
        if "claims" in record:
            parts.append(verified(record["rows"], record["claims"]))
        if "cases" in record:
            parts.append(covered(record["cases"]))
        if "histograms" in record:
            parts.append(histograms(record["histograms"], record["same_ops"]))
    return "\n".join(parts)


def read(folder: Path = RECORDS) -> list[Mapping[str, Any]]:
    """The records that the page has a section for, in its order."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    order = list(SECTIONS)
    return sorted((record for record in found if record["what"] in order), key=lambda r: order.index(r["what"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not up to date")
    options = parser.parse_args()
    text = page(read(options.records))
    if options.check:
        if not options.out.exists() or options.out.read_text() != text:
            raise SystemExit(f"{options.out.name} is stale: python -m benchmarks.report")
    else:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
