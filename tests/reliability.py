"""Write docs/reliability.md from the records of fuzzing, mutation, kills and numerics: python -m tests.reliability"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
TESTS = ROOT / "tests"
MIB = 2**20

# What cmrc promises, and the tests that would notice if it did not hold.
PROMISES = (
    ("A lowered model computes what the model with its units literally replaced computes, within rounding. What cannot be folded is refused, by name.", ("fuzz/test_fuzz.py", "differential/test_differential.py", "zoo/test_matrix.py")),
    ("Every folded number is within a stated bound of the exact one: one float64 expression, rounded once.", ("program/test_error_bound.py", "ir/test_tensors.py")),
    ("`check` compares every output on several batches, and allows no more than follows from the rounding that the model itself shows; the rewritten graph it compares in float64. How small a fault it notices is measured below.", ("program/test_check.py", "numerics/test_tolerance.py")),
    ("A result that folds and would hold more numbers than the model is refused, with the node and both numbers. With `growth=\"allow\"`, or where something stays at run time because you asked for it, the first line of the report says how many more, as it does for bytes, multiply-adds, and a file that is larger by its names and metadata.", ("program/test_growth.py", "passes/test_stored_numbers.py", "fuzz/test_fuzz.py")),
    ("Your model is not changed: a result shares no writable memory with it, and what you train is what is saved.", ("hosts/fx/test_memory.py",)),
    ("No input is overwritten unless you say `--force`.", ("cli/test_outputs.py", "hosts/onnx/test_save.py")),
    ("An output appears whole or not at all. After a kill at any moment the old or the new one is there, and the next run removes what was left.", ("faults/test_kills.py", "hosts/onnx/test_faults.py")),
    ("A full disk, a read-only folder or a second writer gives one message or one of the two outputs, never a mixture.", ("faults/test_commands.py",)),
    ("An interrupted `calibrate` or `plan` with `--checkpoint` continues to the same bits, and measures nothing twice.", ("faults/test_kills.py", "statistics/test_checkpoint.py", "planning/test_progress.py")),
    ("Ctrl-C ends a command within a second, with one line and exit code 130.", ("cli/test_process.py", "faults/test_commands.py")),
    ("Whatever a file says, it is read or refused with one message that names the reason. Nothing in it is executed, and memory is bounded.", ("loaders/test_loaders.py", "program/test_plan_file.py", "statistics/test_files.py", "planning/test_recipe.py", "hosts/onnx/test_load.py")),
    ("Files are read only from where you pointed: external data within the model's folder, a plan's arrays beside the plan and equal to their hash.", ("hosts/onnx/test_load.py", "program/test_plan_file.py")),
    ("A plan is used only for the model that it was made for.", ("program/test_plan.py",)),
    ("The same model, data, recipe and seed give the same bytes, in every process and on any number of threads.", ("planning/test_numerics.py", "faults/test_kills.py")),
)  # fmt: skip

HEAD = """# Reliability

Written by `python -m tests.reliability` from records. A test says when this page is stale.

## What cmrc promises

| promise | tested by |
|---|---|
"""


def read(path: str) -> Any:
    file = TESTS / path
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def table(*rows: tuple[object, ...]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |\n" for row in rows]
    return lines[0] + "|" + "---|" * len(rows[0]) + "\n" + "".join(lines[1:])


def linked(paths: tuple[str, ...]) -> str:
    return ", ".join(f"[{path}](../tests/{path})" for path in paths)


def promises() -> str:
    return HEAD + "".join(f"| {text} | {linked(paths)} |\n" for text, paths in PROMISES)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f}"


def fuzzing() -> str:
    rows: list[tuple[object, ...]] = [("cases", "equal after folding", "equal, something kept at run time", "refused", "wrong or raw", "mended on the way", "minutes", "commit", "command")]  # fmt: skip
    known = {"onnx": "random ONNX graphs, by one state of the code", "onnx_fresh": "random ONNX graphs, fresh seeds, by the state with the mends", "torch": "random torch modules", "node_models": "node tests of onnx"}  # fmt: skip
    for name, what in known.items():
        record = read(f"fuzz/records/{name}.json")
        if record is not None:
            count = record.get("graphs", record.get("cases"))
            folded = record.get("folded", record.get("equal", 0))
            rows.append((f"{count:,} {what}", f"{folded:,}", f"{record.get('kept', 0):,}", f"{record.get('refused', 0):,}", len(record["failures"]), len(record.get("mended", ())), minutes(record["seconds"]), record["commit"], f"`{record['command']}`"))  # fmt: skip
    now, fresh = (read(f"fuzz/records/{name}.json") or {} for name in ("onnx", "onnx_fresh"))
    more = f"\nFresh seeds: {fresh['note']}\n" if "note" in fresh else ""
    return f"""
## Differential fuzzing

Random models times random plans. Each result is compared with a clamp that shares no code with the compiler.

{table(*rows)}
The rest have no site to replace, or were too close to call (onnxruntime itself rounds as much). A failure is minimised and kept under
`tests/fuzz/regressions`; the suite runs a few hundred cases with fixed and fresh seeds.

By one state of the code: {now.get("note", "")}
{more}
{now.get("grown", 0):,} of the clean folds hold more numbers than the model: the plan has more numbers (constants by position) than it saves, or uses
of one shared weight became different. `lower` refuses them, and the fuzzer asks again with `growth="allow"`, since they must be right too. A
file that grew and was not refused is a failure.

Five earlier runs, by other states and partly with a narrower generator, judged 186,057 graphs (79,680 folded cleanly) and met 40 failures, all of
them mended; one case of each kind is under `tests/fuzz/regressions`.
"""


def mutants() -> str:
    record = read("mutation/record.json")
    if record is None:
        return ""
    rows: list[tuple[object, ...]] = [("mutants", "caught", "survived", "minutes", "run by commit", "command")]
    for kind, what in (("seeded", "realistic bugs, seeded by hand"), ("sampled", "changed lines, drawn by a tool")):
        entries = record.get(kind) or {}
        if entries:
            outcomes = Counter(entry["outcome"] for entry in entries.values())
            seconds = sum(entry["seconds"] for entry in entries.values())
            commits = Counter(entry["commit"] for entry in entries.values())
            listed = ", ".join(f"{name}: {count}" for name, count in commits.items())
            rows.append((f"{len(entries)} {what}", outcomes["caught"], outcomes["survived"], minutes(seconds), listed, "`python -m tests.mutation`"))  # fmt: skip
    left = [f"`{name}`" for kind in ("seeded", "sampled") for name, entry in (record.get(kind) or {}).items() if entry["outcome"] == "survived"]  # fmt: skip
    survivors = f"\nSurvivors: {', '.join(left)}. They are not explained yet.\n" if left else ""
    drawn = record.get("sampled") or {}
    again = Counter(entry["at first"] for entry in drawn.values() if "at first" in entry)
    first = (
        f"\nWhen they were drawn, {len(drawn) - again.total()} of {len(drawn)} were caught: that is the rate to expect of other changed lines. "
        f"{again['survived']} survived and {again['undecided']} ran out of time; these were run again, alone, with tests that were written or "
        "chosen for them.\n"
        if again
        else ""
    )
    reasons = [f"- `{name}`: {entry['by']}" for name, entry in drawn.items() if entry["outcome"] == "explained"]
    explained = "\nExplained, for nothing is wrong with them:\n\n" + "\n".join(reasons) + "\n" if reasons else ""
    return f"\n## Mutation\n\nOne bug at a time is put into the code; a test must fail.\n\n{table(*rows)}{survivors}{first}{explained}"


def kills() -> str:
    record, earlier = read("faults/records/kills.json"), read("faults/records/kills_earlier.json")
    if record is None or earlier is None:
        return ""
    rows: list[tuple[object, ...]] = [("command", "kills", "old output", "new output", "left something", "resumed", "kills per tenth of the run", "wrong")]  # fmt: skip
    for name, row in record["commands"].items():
        rows.append((name, row["kills"], row["old output"], row["new output"], row["left something"], row["resumed"], " ".join(map(str, row["tenths of the run"])), len(row["wrong"])))  # fmt: skip
    return f"""
## Faults

{record["kills"]} kills (SIGKILL) at moments drawn uniformly over the work of a command, over an older output; {len(record["wrong"])} wrong.
`{record["command"]}`, {minutes(record["seconds"])} minutes, commit {record["commit"]}. An earlier run had {earlier["kills"]} kills (commit {earlier["commit"]}), {len(earlier["wrong"])} wrong.

{table(*rows)}
The output is compared byte by byte with the old and the new one. What a killed writer leaves is its staging folder `.cmrc-*`, or a file of
weights or arrays that nothing refers to: the next run of the same command removes it, and gives the new output to the last byte. "Resumed"
counts runs that found a checkpoint. Most processes are forked from one that has imported everything, so that all of their time is
work; two per command are new interpreters. A process that ends before its moment is not counted, so that the last tenth has fewer kills. Besides, a save is killed, and fails, at every one of its file operations
([hosts/onnx/test_faults.py](../tests/hosts/onnx/test_faults.py)).
{record.get("note", "")}
"""


def _mended(record: dict[str, Any]) -> str:
    """Places in the code that failed during the run and are mended, and the cases that met them."""
    counts = record["counts"]
    failed = counts["cases"] - counts["read"] - counts["refused"]
    return f"{len(record['mended'])} ({failed} cases)" if record["mended"] else "0"


def loaders() -> str:
    rows: list[tuple[object, ...]] = [("files", "cases", "of them by command", "read", "refused", "failing", "mended on the way", "minutes", "peak memory", "commit", "command")]  # fmt: skip
    limits, notes = {}, ""
    for kind, name in (
        (k, f"{k}{again}") for again in ("_again", "") for k in ("plan", "stats", "recipe", "model", "data")
    ):
        record = read(f"loaders/records/{name}.json")
        if record is not None:
            counts, limits = record["counts"], record["limits"]
            rows.append((kind, f"{counts['cases']:,}", f"{counts['by command']:,}", f"{counts['read']:,}", f"{counts['refused']:,}", len(record["failing"]), _mended(record), minutes(record["seconds"]), f"{record['memory'] / MIB:.0f} MiB", record["commit"], f"`{record['command']}`"))  # fmt: skip
            notes += f"{kind}: {record['note']}\n\n" if "note" in record else ""
    if not limits:
        return ""
    return f"""
## Loaders

Valid files with changes that know their format, guided by the coverage of cmrc's code (atheris). A case is read, and used as the commands use
it. It fails if anything but a CmrcError comes out, on the command line anything but exit code 0, 1 or 2 with one message, if it takes more than
{limits["seconds"]} s of processor time, or if the process needs more than {limits["memory"] / 2**30:.0f} GiB of address space, libraries included.

{table(*rows)}
{notes}Minutes are by the clock, of a machine that did other work too in the later runs (the first five rows): the cases say how much was tried.

{len(list((TESTS / "loaders" / "regressions").glob("*.bin")))} cases that failed once, most of them in the first minutes, before these runs were counted, are
kept under `tests/loaders/regressions` and pass now. A .npz file may expand to 1 GiB, or to a hundred times its size; more is refused before it is read.
"""


def numerics() -> str:
    record, fuzzed = read("numerics/record.json"), read("fuzz/records/onnx.json") or {}
    if record is None:
        return ""
    rows: list[tuple[object, ...]] = [("network", "the lowered model, error / tolerance", "one entry off by 1e-3: seen in the file", "of a fold: seen in float64", "the right fold in float64", "of a file: seen in the float32 outputs", "not above rounding", "error / tolerance, median (smallest)")]  # fmt: skip
    for name, row in record["networks"].items():
        rows.append((name, f"{row['right']:.3f}", f"{row['noticed in the file']} of {row['cases']}", f"{row['noticed in float64']} of {row['cases']}", f"{row['right in float64']:.0e}", f"{row['noticed']} of {row['cases']}", row["within rounding"], f"{row['median']:.1f} ({row['smallest']:.2g})"))  # fmt: skip
    return f"""
## Numerics

Every folded number p' is within `u·|p*| + (1 + u)·γ·(|b| + Σ|W_s c_s|) + η` of the exact result p*
([design.md](design.md)), tested against rational arithmetic. How far `check` is from its tolerance: on a lowered model, and on
the same with one entry of a folded weight or bias off by 1e-3 of the largest entry there.

{table(*rows)}
`{record["command"]}`, commit {record["commit"]}. `cmrc check` compares the weights of a file as `cmrc lower` writes it number by number with what folding the plan gives, and
the outputs beside that: the first sees every wrong number, the second also what a wrong fold would do. Where outputs lie further apart than the
tolerance, the clamped model is computed in float64, and they may differ by twice its own error. Magika needs this: its norms take E[x²] - E[x]²
and divide by almost nothing, so that its float32 outputs are off by 2.3e-03, which hides single wrong entries there.

`lowered.check()` also computes the rewritten graph and the clamped one in float64, on one batch, where every op has a meaning in the IR, none behind
a replacement jumps, and the work is seconds. Of {fuzzed.get("in_float64", 0):,} right folds of random graphs (in the fuzz run above), the farthest lay at {fuzzed.get("worst_in_float64", 0):.0e}, where 1e-9 is
allowed; one beyond it is a failure of the run. Models that round to steps are compared more loosely, and are not among them. A wrong entry that is not seen there
belongs to a unit that is off on that batch, or hardly reaches the output. The perturbed entries of the columns are drawn apart from each other.

An error above 1 times the tolerance is noticed. "Not above rounding" are wrong entries that move the outputs on these batches by
no more than twice what the lowered model differs by anyway (a unit that is off there, for instance). The rest of those that are not noticed lie
between rounding and the tolerance: the outputs do not show single errors of this size.
"""


def supply() -> str:
    record = read("supply/record.json")
    if record is None:
        return ""
    faults = (
        "; ".join(f"{name}: {', '.join(ids)}" for name, ids in record["faults"].items()) or "none has a known fault"
    )
    return f"""
## Supply chain

- `bash .ci/wheel` builds the wheel twice from the committed tree, compares the two byte by byte, tries it in an empty environment, and writes a
  bill of materials (CycloneDX) beside it. `.ci/run` builds twice and compares (`bash .ci/wheel --build`).
- `{record["command"]}` asks PyPI for the known faults of the pinned set (commit {record["commit"]}): {record["audited"]} of {record["packages"]} packages
  are pinned at their newest version, for which it answers, and {faults}. As a control, it names those of {", ".join(record["control"])}. Not asked are the pinned
  versions that are not the newest: {", ".join(record["not newest"])}. `pip-audit -r constraints.txt --no-deps --disable-pip` asks for
  those too; the mirror that could be reached where this page was written does not answer for single versions.
"""


def page() -> str:
    return promises() + fuzzing() + mutants() + kills() + loaders() + numerics() + supply()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
