"""How often the certificates hold for the population, and how wide they are, where the truth is known.

python -m benchmarks.coverage

A population of 10,000 inputs, in which some inputs (and some sources) are harder than others. A held-out set is drawn from it, its
inputs are paired once, each pair is swapped with several masks, and every rung of the ladder is bounded at δ = 0.05. The truth is
that of the population. Bounds are looked at after every pair: a bound misses if it is ever above the truth.

How often a cell is repeated follows a rule that was fixed before the first run: `REPETITIONS` times, and `MORE` times in all where
a bound held in less than `CLOSE` of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Resumed, arguments, progress, write_record
from benchmarks.section import Record, Section, claim, table
from cmrc.ir.graph import Array
from cmrc.verification.bounds import lower_any_time, lower_rate, refuted, upper_rate
from cmrc.verification.certificates import FOR_CHOICE, NAMES, best_markov, best_tail, from_d2, from_tails
from cmrc.verification.evidence import Evidence
from cmrc.verification.targets import EVENTS

DELTA, MASKS, POPULATION = 0.05, 8, 10_000
SIZES = (100, 360, 1000, 5000)
RATES = (0.0002, 0.001, 0.01, 0.05, 0.2, 0.5)  # of disagreement
COUNTED = 20_000  # swaps of the same inputs, counted as if they were fresh: what was done before
FEWER = 200  # repetitions for that
REPETITIONS = 20_000
MORE = 80_000
CLOSE = 0.955
WIDTHS = 40  # repetitions that the widths are averaged over
CHUNK = 100  # repetitions at a time


@dataclass(frozen=True)
class Population:
    """Each input is a factor of margin and distortion as a base and as a source; masks add their own.

    Numbers are of single precision, the truth's as well as the samples', which halves the time.
    """

    margin: Array  # [2, inputs]: as base, as source
    distortion: Array
    scale: float

    def swaps(self, rng: np.random.Generator, base: Array, source: Array) -> Evidence:
        """Swaps of any shape, in which an agreement may survive a spread beyond the margin, but never the reverse."""
        shape = base.shape

        def one(effect: Array) -> Array:
            noise = np.exp(np.float32(0.5) * rng.standard_normal(shape, dtype=np.float32))
            return effect[0, base] * effect[1, source] * noise

        def uniform() -> Array:
            return rng.random(shape, dtype=np.float32)

        margin, largest = one(self.margin), np.float32(self.scale) * one(self.distortion)
        spread = largest * (1 + uniform())
        agree = margin > spread * uniform()
        squared = largest**2 * (1 + 3 * uniform())
        rows = [a.reshape(-1, 1) for a in (agree, squared, largest, spread, margin)]
        count = base.size
        unit = np.repeat(np.arange(count // shape[-1]), shape[-1]) if base.ndim > 1 else np.arange(count)
        whole = np.ones(count)
        return Evidence(
            rows[0],
            rows[1],
            rows[1],
            rows[2],
            rows[3],
            rows[4],
            whole[:, None],
            np.zeros((count, 1)),
            whole,
            unit,
            whole,
        )

    def at_random(self, rng: np.random.Generator, count: int) -> Evidence:
        return self.swaps(rng, *rng.integers(POPULATION, size=(2, count)))


def population(rate: float, draws: int) -> Population:
    """The scale of the distortion at which both disagree at this rate."""
    rng = np.random.default_rng(0)
    effects = [np.array([[0.8], [0.4]]) * rng.standard_normal((2, POPULATION)) for _ in range(2)]
    margin, distortion = (np.exp(effect).astype(np.float32) for effect in effects)
    low, high = -12.0, 6.0
    for _ in range(24):
        middle = (low + high) / 2
        drawn = Population(margin, distortion, math.exp(middle)).at_random(np.random.default_rng(1), draws)
        low, high = (middle, high) if 1 - drawn.agree.mean() < rate else (low, middle)
    return Population(margin, distortion, math.exp(low))


def pairs_of(rng: np.random.Generator, repetitions: int, inputs: int) -> tuple[Array, Array]:
    """Base and source [repetitions, pairs, masks]: inputs drawn from the population, each in one pair, directions in turn."""
    drawn = rng.integers(POPULATION, size=(repetitions, inputs // 2, 2))
    turn = np.arange(MASKS) % 2
    return drawn[..., turn], drawn[..., 1 - turn]


def simulate(rate: float, inputs: int, repetitions: int, more: int, draws: int) -> dict[str, Any]:
    """For each rung: its truth, how often its bound holds, and how wide bounds are."""
    people, truth = known(rate, draws)
    rng = np.random.default_rng([round(1e6 * rate), inputs, 3])
    misses = dict.fromkeys([*NAMES, "direct, from above"], 0)
    widths: dict[str, list[float]] = {}
    done, wanted, counted = 0, repetitions, 0
    while done < wanted:
        count = min(CHUNK, wanted - done)
        drawn = people.swaps(rng, *pairs_of(rng, count, inputs))
        for name, missing in misses_of(drawn, count, inputs // 2, truth).items():
            misses[name] += missing
        if done < FEWER:
            counted += counted_misses(people, rng, count, inputs, truth["direct"])
        rows = inputs // 2 * MASKS
        for i in range(min(count, WIDTHS - done)):
            for name, wide in widths_of(drawn.part(slice(i * rows, (i + 1) * rows))).items():
                widths.setdefault(name, []).append(wide)
        done += count
        if done == repetitions and 1 - max(misses.values()) / done < CLOSE:
            wanted = more
    coverage = {name: 1 - missing / done for name, missing in misses.items()}
    coverage["counting swaps"] = 1 - counted / min(FEWER, done)
    width = {name: float(np.mean(values)) for name, values in widths.items()}
    return {"rate": rate, "inputs": inputs, "truth": truth, "repetitions": done, "held": coverage, "width": width}


def misses_of(drawn: Evidence, count: int, pairs: int, truth: dict[str, float]) -> dict[str, int]:
    """Of `count` held-out sets, for how many each bound is wrong after any pair."""
    misses = {}
    for name in ("samplewise", "range", "direct"):
        values = EVENTS["iia" if name == "direct" else name](drawn).reshape(count, pairs).T
        misses[name] = missed(values, truth[name])
        if name == "direct":
            misses["direct, from above"] = missed(1 - values, 1 - truth[name])
    for name in ("markov", "tail"):
        misses[name] = missed_by_choice(drawn, name, count, pairs, truth["tail"])
    return misses


@functools.cache
def known(rate: float, draws: int) -> tuple[Population, dict[str, float]]:
    """A population, and every rung's value for it."""
    people = population(rate, draws)
    rng, everyone = np.random.default_rng(2), np.arange(POPULATION)
    sums, rounds = dict.fromkeys(EVENTS, 0.0), 100 * draws // POPULATION
    for _ in range(rounds):  # every input once as a base and once as a source
        drawn = people.swaps(rng, everyone, rng.permutation(POPULATION))
        for name, event in EVENTS.items():
            sums[name] += float(event(drawn).mean()) / rounds
    some = people.at_random(rng, 2 * draws)
    truth = {"markov": best_markov(some)[0], "tail": best_tail(some)[0], "direct": sums.pop("iia"), **sums}
    return people, truth


def missed(values: Array, truth: float) -> int:
    """Of samples [pairs, samples], how many refute the truth after any pair: their bound would lie above it."""
    if not 0 < truth < 1:
        return 0  # no bound lies beyond 0 or 1
    return int((refuted(values, np.full(values.shape[1], truth), DELTA) > 0).sum())


def missed_by_choice(drawn: Evidence, name: str, count: int, pairs: int, truth: float) -> int:
    """As `certificates` does: ε from the first fifth of the pairs, the bound from the rest."""
    first = pairs // FOR_CHOICE
    margin, squared, largest = (a.reshape(count, pairs, MASKS) for a in (drawn.margin, drawn.squared, drawn.largest))

    def chosen(i: int) -> float:
        margins = margin[i, :first].ravel()
        if name == "markov":
            return from_d2(margins, float(squared[i, :first].mean()))[1]
        return from_tails(margins, largest[i, :first].ravel())[1]

    epsilon = np.array([chosen(i) for i in range(count)])[:, None, None]
    close = margin[:, first:] <= 2 * epsilon
    far = np.minimum(squared[:, first:] / epsilon**2, 1) if name == "markov" else largest[:, first:] > epsilon
    values = 1 - (close.mean(axis=2) + far.mean(axis=2)) / 2
    return missed(values.T, (1 + truth) / 2)


def counted_misses(people: Population, rng: np.random.Generator, count: int, inputs: int, truth: float) -> int:
    """The two-sided binomial interval of many swaps of the same inputs, base and source drawn anew for each."""
    missing = 0
    for _ in range(count):
        chosen = rng.integers(POPULATION, size=inputs)
        hits = int(people.swaps(rng, *chosen[rng.integers(inputs, size=(2, COUNTED))]).agree.sum())
        low, high = (bound(hits, COUNTED, DELTA / 2) for bound in (lower_rate, upper_rate))
        missing += not low <= truth <= high
    return missing


# ---------------------------------------------------------------- widths of other bounds


def hoeffding(values: Array) -> float:
    return math.sqrt(math.log(1 / DELTA) / (2 * len(values)))


def bernstein(values: Array) -> float:
    """Maurer and Pontil 2009."""
    log, count = math.log(2 / DELTA), len(values)
    return math.sqrt(2 * float(values.var(ddof=1)) * log / count) + 7 * log / (3 * (count - 1))


def hedged(values: Array) -> float:
    """The betting interval of Waudby-Smith and Ramdas 2024 for a fixed number, one-sided."""
    count, log = len(values), math.log(1 / DELTA)
    time = np.arange(1, count + 1)
    means = (0.5 + np.cumsum(values)) / (time + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (time + 1)
    stakes = np.sqrt(2 * log / (count * np.concatenate([[0.25], variances[:-1]])))
    nulls = np.sin(np.linspace(0, math.pi / 2, 1500)[1:-1]) ** 2
    nulls = nulls[nulls < values.mean()]
    path = np.zeros(len(nulls))
    best = np.zeros(len(nulls))
    for block in np.array_split(np.arange(count), max(1, count // 50)):
        steps = np.minimum(stakes[block, None], 0.75 / nulls) * (values[block, None] - nulls)
        walked = path + np.cumsum(np.log1p(steps), axis=0)
        path, best = walked[-1], np.maximum(best, walked.max(axis=0))
    stands = best < log
    first = int(stands.argmax()) if stands.any() else len(nulls)
    return float(values.mean() - (nulls[first - 1] if first else 0.0))


def recalculated(values: Array) -> float:
    """Target-recalculating bets (Voráček and Orabona 2025, arXiv 2505.22422), without their randomised last step.

    λ = √(2 (log 1/δ − log W)⁺ / (r S)) with r values to come, W the capital and S the second moment around the null.
    """
    count, enough = len(values), math.log(1 / DELTA)
    nulls = np.sin(np.linspace(0, math.pi / 2, 1500)[1:-1]) ** 2
    nulls = nulls[nulls < values.mean()]
    capital, best, second = np.zeros(len(nulls)), np.zeros(len(nulls)), np.zeros(len(nulls))
    for time, value in enumerate(values):
        most = nulls * (1 - nulls) + 1e-3
        moment = np.minimum((second + (nulls + 1e-4) * count / time) / time, most) if time else most
        stake = np.sqrt(2 * np.maximum(enough - capital, 0) / ((count - time) * moment))
        capital = capital + np.log1p(np.minimum(stake, 1 / (nulls + 1e-3)) * (value - nulls))
        best, second = np.maximum(best, capital), second + (value - nulls) ** 2
    stands = best < enough
    first = int(stands.argmax()) if stands.any() else len(nulls)
    return float(values.mean() - (nulls[first - 1] if first else 0.0))


def widths_of(one: Evidence) -> dict[str, float]:
    """Estimate minus lower bound of the IIA."""
    values = EVENTS["iia"](one)
    single = one.agree[::MASKS, 0].astype(np.float64)
    methods: dict[str, Callable[[Array], float]] = {
        "Hoeffding": hoeffding,
        "empirical Bernstein": bernstein,
        "betting, hedged": hedged,
        "betting, recalculated": recalculated,
        "ours": lambda v: float(v.mean()) - lower_any_time(v, DELTA),
    }
    widths = {name: min(method(values), float(values.mean())) for name, method in methods.items()}
    exact = lower_rate(int(single.sum()), len(single), DELTA)
    return {**widths, "Clopper-Pearson, one mask": float(single.mean()) - exact}


# ---------------------------------------------------------------- the page

SHOWN = (
    "Hoeffding",
    "empirical Bernstein",
    "betting, hedged",
    "betting, recalculated",
    "Clopper-Pearson, one mask",
    "ours",
)


def certainty(record: Record) -> str:
    """How many repetitions there are, and what they can tell; records of before the rule have the same number everywhere."""
    if "more" not in record:
        chance = 100 * 2.58 * math.sqrt(DELTA * (1 - DELTA) / record["repetitions"])
        return f"{record['repetitions']} repetitions can show 95 only to within ± {chance:.1f}."
    return (
        f"By a rule that was fixed beforehand each cell is repeated {record['repetitions']} times, and {record['more']} times in all where "
        f"a bound held in less than {record['close']:.1%} of them, so that the numbers near 95 have a standard error of {record['error']:.2f}."
    )


def body(record: Record) -> str:
    names = [*NAMES, "direct, from above", "counting swaps"]
    holding = [
        (
            str(c["inputs"]),
            f"{c['rate']:g}",
            str(c.get("repetitions", record["repetitions"])),
            *(f"{100 * c['held'][name]:.1f}" for name in names),
        )
        for c in record["cases"]
    ]
    wide = [
        (
            str(c["inputs"]),
            f"{c['rate']:g}",
            *(f"{c['width'][name]:.4f}" if name in c["width"] else "" for name in SHOWN),
        )
        for c in record["cases"]
    ]
    return "\n".join(
        [
            f"{certainty(record)}\n",
            table(("inputs", "disagreement", "repetitions", *names), holding),
            "Estimate minus lower bound of the IIA, mean:\n",
            table(("inputs", "disagreement", *SHOWN), wide),
        ]
    )


SECTIONS = (
    Section(
        "coverage",
        "How often the certificates hold for the population",
        """A population of {population} inputs whose certificates are all known; held-out sets of each size; each set is paired once,
{masks} masks for each pair; δ = {delta}. In percent, how often each bound holds at all times together, looked at after every pair: at
least 95 is promised. *Counting swaps* is the two-sided binomial interval of {counted} swaps among the same inputs, which counts swaps
as if inputs were fresh ({fewer} repetitions).
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__, "coverage.json")
    repetitions, more, draws = (20, 40, 50_000) if options.quick else (REPETITIONS, MORE, 1_000_000)
    sizes, rates = (SIZES[:2], RATES[::3]) if options.quick else (SIZES, RATES)
    shown = Table("inputs", "rate", "repetitions", *NAMES, "from above", "counting swaps", box=None)
    resumed, cases, claims = Resumed(options.json), [], []
    settings = [(inputs, rate) for inputs in sizes for rate in rates]
    for inputs, rate in progress(settings, f"{len(settings)} cases"):
        name = f"{inputs} inputs, disagreement {rate:g}"
        case = resumed(name, functools.partial(simulate, rate, inputs, repetitions, more, draws))
        cases.append(case)
        shares = (f"{100 * share:.1f}" for share in case["held"].values())
        shown.add_row(str(inputs), f"{rate:g}", str(case["repetitions"]), *shares)
        least = min(share for bound, share in case["held"].items() if bound != "counting swaps")
        claims.append(claim(f"{name}: least coverage", least, ">=", 1 - DELTA))
    Console(width=120).print(shown)
    error = 100 * math.sqrt(DELTA * (1 - DELTA) / more)
    facts = {"delta": DELTA, "masks": MASKS, "population": POPULATION, "counted": COUNTED, "fewer": FEWER, "close": CLOSE,
             "more": more, "error": error, "repetitions": repetitions, "cases": cases, "claims": claims}  # fmt: skip
    write_record(options.json, "coverage", [], options, **facts, wall_seconds=resumed.seconds)
    resumed.forget()


if __name__ == "__main__":
    main()
