"""What planning costs beside one plain forward pass over the same data.

python -m benchmarks.planning_cost [NAME ...] [--units N ...] [--quick] [--json OUT]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cmrc
from benchmarks import models, subjects
from benchmarks.measure import Resumed, console, parser, show, use_threads, write_record
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.subjects import Subject
from benchmarks.trained import TRAININGS
from cmrc.planning.recipe import make_recipe
from cmrc.planning.selection import eliminate

JOINT, FITS = 1.25, 2.5  # plain forward passes, at most
WIDTHS = {3072: 1.5, 11008: 60.0}  # units of a site, and the seconds that half of them may take
MATRICES = 3  # of units by units in float64, at most


def untrained(name: str, samples: int) -> Subject:
    """A network of ours with random weights, on random pictures: what is measured does not depend on either."""
    model = models.randomise(TRAININGS[name].make())
    x = np.random.default_rng(0).normal(size=(samples, 3, 32, 32)).astype(np.float32)
    batches = [{"x": x[i : i + 50]} for i in range(0, samples, 50)]
    return Subject(name, "", model, TRAININGS[name].sites, batches, lambda run: {})


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "ResNet-8": lambda quick: untrained("resnet", 100 if quick else 1000),
    "ViT": lambda quick: untrained("vit", 100 if quick else 1000),
    "MiniLM-L6": lambda quick: subjects.minilm(),
    "EfficientNet-Lite0": lambda quick: subjects.efficientnet(images=80, tests=20),
    "PP-OCRv4 rec": lambda quick: subjects.recogniser(tests=20),
    "SmolLM2-135M": lambda quick: subjects.smollm(tests=1),
}
QUICK = ("ResNet-8", "ViT")


def measure(subject: Subject, rounds: int) -> dict[str, Any]:
    """Processor seconds of each step, the least of some rounds; a round runs all of them, one after the other."""
    program, batches = subject.program, subject.batches
    given = {"sites": subject.sites, "keep": subject.keep, "multiple_of": 1, **subject.recipe, "preset": "joint"}
    recipe = make_recipe(**given, recompute="never")
    program.fingerprint  # noqa: B018  (of the model, once)
    spent: dict[str, list[float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = step()
        spent.setdefault(name, []).append(time.process_time() - start)
        return result

    def round_of_all() -> None:
        timed("forward", lambda: [program.run(batch) for batch in batches])
        stats = timed(
            "calibrate",
            lambda: cmrc.calibrate(program, batches, sites=subject.sites, need=recipe.needs, **recipe.calibration),
        )
        plan = timed("plan", lambda: cmrc.plan(program, stats, recipe=recipe))
        timed("lower", lambda: cmrc.lower(program, plan).report)
        fitted = timed("fits", lambda: cmrc.plan(program, data=batches, recipe={**given, "recompute": "all"}))
        timed("lower fits", lambda: cmrc.lower(program, fitted).report)

    for _ in range(rounds):
        round_of_all()
    least = {name: min(seconds) for name, seconds in spent.items()}
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    macs = len(batches) * subject.sized.cost({"batch": len(next(iter(batches[0].values())))}).macs
    return {"samples": samples, "sites": len(subject.sites), "rounds": rounds, "macs": macs, "seconds": least}


def passes(row: Record) -> tuple[float, float]:
    """Of `joint` and with fits in order, in plain forward passes."""
    s = row["seconds"]
    return (s["calibrate"] + s["plan"] + s["lower"]) / s["forward"], (s["fits"] + s["lower fits"]) / s["forward"]


def selection(units: int) -> dict[str, Any]:
    """Half of the units of a site by elimination: processor seconds, and what the process held beyond the two matrices given."""
    random = np.random.default_rng(0)
    rows = np.maximum(random.normal(size=(units + units // 2, units // 4)) @ random.normal(size=(units // 4, units)), 0)
    rows = (rows + random.normal(size=rows.shape)).astype(np.float32)
    weight = random.normal(size=(units // 4, units)).astype(np.float32)
    covariance, gram = (np.asarray(part.T @ part, dtype=np.float64) / len(part) for part in (rows, weight))
    centred = rows[:512].astype(np.float64)
    start = time.process_time()
    centred.T @ centred  # one triangle, which is mirrored
    products = len(centred) * units**2 / 2 / (time.process_time() - start)
    del rows, weight, centred
    before = _held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here on
    start, used = time.perf_counter(), time.process_time()
    order = eliminate(gram, covariance, count=units // 2)
    seconds = {"seconds": time.perf_counter() - start, "processor seconds": time.process_time() - used}
    matrices = (_held("VmHWM") - before) / covariance.nbytes
    more = {"products a second": products, "matrices": matrices, "risk": float(order.added.sum())}
    return {"units": units, **seconds, **more}


def _held(what: str) -> int:
    """Bytes of this process: now (VmRSS) or at most (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) << 10


def body(record: Record) -> str:
    rows = [
        (
            name,
            f"{row['samples']}",
            f"{row['sites']}",
            *(show(row["seconds"][step]) for step in ("forward", "calibrate", "plan", "lower", "fits")),
            *(f"{each:.2f}" for each in passes(row)),
        )
        for name, row in record["networks"].items()
    ]
    head = ("network", "samples", "sites", "forward", "calibrate", "plan", "lower", "plan with fits", "joint, in passes", "with fits, in passes")  # fmt: skip
    widths = [
        (str(row["units"]), show(row["processor seconds"]), f"{row['matrices']:.2f}") for row in record["selection"]
    ]
    sites = table(("units of a site", "half of them selected in", "matrices held beyond the two given"), widths)
    return "\n".join((table(head, rows), sites, claims(record["claims"]), on_paper(record)))


MODEL = {"parameters": 70e9, "layers": 80, "units": 28672, "tokens": 1e8, "machines": 64}


def on_paper(record: Record) -> str:
    """What a model and an amount of data that no machine here holds would take, from the rates and exponents of this record."""
    widths = [row for row in record["selection"] if row["units"] in WIDTHS]
    slowest = min(record["networks"].values(), key=lambda row: row["macs"] / row["seconds"]["forward"])
    largest = max(record["networks"].values(), key=lambda row: row["macs"])
    if len(widths) < len(WIDTHS):
        return ""
    (small, small_time), (large, large_time) = ((row["units"], row["processor seconds"]) for row in widths)
    exponent = np.log(large_time / small_time) / np.log(large / small)
    m, rate = MODEL, largest["macs"] / largest["seconds"]["forward"]
    forward = m["parameters"] * m["tokens"] / rate
    products = m["layers"] * m["tokens"] * m["units"] ** 2 / 2 / widths[-1]["products a second"]
    selection = m["layers"] * large_time * (m["units"] / large) ** exponent
    bytes_of_all = m["layers"] * m["units"] ** 2 * 8
    rows = (
        ("one forward pass", f"{m['parameters'] * m['tokens']:.2g} products at {rate:.2g} a second", forward),
        ("second moments of every FFN", f"{m['layers'] * m['tokens'] * m['units'] ** 2 / 2:.2g} products in float64", products),
        ("selection of half of every FFN", f"{small} to {large} units grow with the power {exponent:.2f}", selection),
    )  # fmt: skip
    steps = table(
        ("what", "from", "days of one of these cores", "days of a core on each machine, shared out evenly"),
        ((name, by, f"{s / 86400:.3g}", f"{s / 86400 / m['machines']:.3g}") for name, by, s in rows),
    )
    rates = f"{slowest['macs'] / slowest['seconds']['forward']:.2g}"
    return f"""#### On paper: 70 billion parameters, 100 million tokens, 64 machines

No machine here can run this. What is measured above gives, for {m["layers"]} layers with {m["units"]} units in each FFN:

{steps}
The rate is that of the network with the most products here; the lowest is {rates} a second. Selection and fits run in every process today,
so they are not shared out. The statistics are put together by one all-reduce of {bytes_of_all / 1e9:.0f} GB ({bytes_of_all / m["layers"] / 1e9:.1f} GB
a layer), of which a ring sends and receives twice as much on each machine: at 10 GB a second {2 * bytes_of_all / 1e10:.0f} s. With fits in
order, layer by layer, no more than a layer's statistics are held.
"""


TEXT = """Half of the units at the sites of each network, one thread, processor seconds, the least of some rounds that run every step.
*joint* is to calibrate, plan and lower; *with fits* one call that selects and fits each site after those before it, as `cmrc plan`
does without another word, and the lowering. ResNet-8 and ViT have random weights. Second moments of a layer as wide as the next one's weights cost about as many
products as that layer, if they are summed over all positions; rows are drawn where there are some to spare (`rows_per_unit`).
"""
SECTIONS = (Section("planning_cost", "Planning cost", TEXT, body),)


def judged(networks: dict[str, Any], widths: Sequence[Record]) -> list[dict[str, Any]]:
    judgements = []
    for name, row in networks.items():
        joint, fits = passes(row)
        judgements.append(claim(f"{name}: calibrate, plan and lower by joint, in forward passes", joint, "<=", JOINT))
        judgements.append(claim(f"{name}: with fits in order, in forward passes", fits, "<=", FITS))
    for row in widths:
        if row["units"] in WIDTHS:
            limit = WIDTHS[row["units"]]
            judgements.append(
                claim(f"{row['units']} units: seconds of selection", row["processor seconds"], "<=", limit)
            )
            judgements.append(claim(f"{row['units']} units: matrices held", row["matrices"], "<=", MATRICES))
    return judgements


def main() -> None:
    arguments = parser("What planning costs beside a forward pass.", "planning_cost.json")
    arguments.add_argument("names", nargs="*", help="networks; all of them if absent")
    arguments.add_argument(
        "--units", nargs="*", type=int, default=list(WIDTHS), help="sites that are selected in; by default %(default)s"
    )
    options = arguments.parse_args()
    use_threads(options.threads)
    torch.manual_seed(0)
    names = options.names or (QUICK if options.quick else list(SUBJECTS))
    resumed = Resumed(options.json)
    networks = {}
    for name in names:
        console.print(name)
        networks[name] = resumed(
            name, lambda name=name: measure(SUBJECTS[name](options.quick), 1 if options.quick else 3)
        )
        console.print(networks[name]["seconds"], [round(each, 2) for each in passes(networks[name])])
    widths = [
        resumed(f"{units} units", lambda units=units: selection(units))
        for units in ((512,) if options.quick else options.units)
    ]
    write_record(
        options.json, "planning cost", [], options, networks=networks, selection=widths, claims=judged(networks, widths)
    )
    resumed.forget()


if __name__ == "__main__":
    main()
