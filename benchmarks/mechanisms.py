"""What a learned mechanism that is not affine would bring: a small network of the kept units in the replaced units' place.

python -m benchmarks.mechanisms [--quick] [--json OUT] [--threads N]

Boolean circuit, six seeds. Maps learned on swaps fold into what is there. A network does not: it stays as nodes of its own
(linear, ReLU, linear), with weights of its own. So it stands beside an affine map of as many more kept units as these weights pay for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.measure import Resumed, arguments, progress, use_threads, write_record
from benchmarks.reductions import LEARNED, SWAPS, Case, difference, kept, small, spread
from benchmarks.section import Record, Section, claim, claims, table
from benchmarks.verification import boolean
from cmrc.statistics.readers import logits_of

HIDDEN = 8  # of the small network
STEPS, BATCH, EVERY = 2000, 512, 100
FORMS = ("affine", "network", "affine, more units")
SEEDS = 6


class Swaps:
    """Swaps of some kept units of a case: what a reduced model sees, and what the original makes of it."""

    def __init__(self, case: Case, rows: np.ndarray, keep: list[int]) -> None:
        readers = logits_of(case.program, case.stats[case.site].columns)
        assert readers is not None
        self.weight, self.bias = (torch.tensor(array, dtype=torch.float32) for array in readers)
        self.rows, self.keep = torch.from_numpy(rows).float(), keep

    def drawn(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept units, and the original's logits."""
        base, source = (self.rows[torch.randint(len(self.rows), (count,), generator=generator)] for _ in range(2))
        mixed = base.clone()
        swapped = torch.rand((count, len(self.keep)), generator=generator) < 0.5
        mixed[:, self.keep] = torch.where(swapped, source[:, self.keep], base[:, self.keep])
        return mixed[:, self.keep], mixed @ self.weight.T + self.bias


def divergence(answers: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(answers.log_softmax(1), original.log_softmax(1), reduction="batchmean", log_target=True)


def activations(case: Case, x: np.ndarray) -> np.ndarray:
    return np.asarray(case.program.run([x], [case.stats[case.site].columns.value])[-1])


def affine(case: Case, keep: int) -> tuple[list[int], nn.Linear]:
    """The kept units of the plan that is learned on swaps, and the head that it folds into."""
    plan = case.by(LEARNED, keep)
    (entry,) = plan.entries
    units = sorted(kept(plan, case.units))
    readers = logits_of(case.program, case.stats[case.site].columns)
    assert readers is not None
    weight, bias = readers
    folded = nn.Linear(len(units), len(weight))
    slope = weight[:, units].copy()
    if entry.weight is not None:
        slope[:, [units.index(p) for p in entry.parents]] += weight[:, list(entry.units)] @ entry.weight
    with torch.no_grad():
        folded.weight.copy_(torch.from_numpy(slope))
        folded.bias.copy_(torch.from_numpy(bias + weight[:, list(entry.units)] @ entry.constant.ravel()))
    return units, folded


def network(swaps: Swaps, held_out: Swaps, head: nn.Linear, seed: int, steps: int) -> nn.Module:
    """The folded head with a small network beside it, trained on swaps of its own; the state with the least KL on held-out rows."""
    torch.manual_seed(seed)
    beside = nn.Sequential(nn.Linear(head.in_features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, head.out_features))
    nn.init.zeros_(beside[2].weight)
    model = Beside(head, beside)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator, look = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    judged = held_out.drawn(8192, look)
    least, best = float("inf"), model.state_dict()
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                value = float(divergence(model(judged[0]), judged[1]))
            if value < least:
                least, best = value, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        x, original = swaps.drawn(BATCH, generator)
        loss = divergence(model(x), original)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.load_state_dict(best)
    return model


class Beside(nn.Module):
    def __init__(self, head: nn.Linear, beside: nn.Module) -> None:
        super().__init__()
        self.head, self.beside = head, beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.beside(x)


def measure(case: Case, swaps: int, steps: int) -> list[dict[str, Any]]:
    rows, fan_in = [], case.stats[case.site].columns.units  # as wide as the layer before
    inside, test = activations(case, case.calibration[0]), activations(case, case.test[0])
    for keep in (case.units // 2, case.units // 4):
        units, head = affine(case, keep)
        few = len(inside) // 4
        trained = network(Swaps(case, inside[few:], units), Swaps(case, inside[:few], units), head, case.seed, steps)
        extra = HIDDEN * (keep + head.out_features + 1)
        more = min(case.units - 1, keep + extra // (fan_in + 1 + head.out_features))
        wider, other = affine(case, more)
        for form, which, model in (
            ("affine", units, head),
            ("network", units, trained),
            ("affine, more units", wider, other),
        ):
            x, original = Swaps(case, test, which).drawn(10 * swaps, torch.Generator().manual_seed(case.seed))
            with torch.no_grad():
                answers = model(x)
            iia = float((answers.argmax(1) == original.argmax(1)).float().mean())
            numbers = {"iia": iia, "kl": float(divergence(answers, original)), "kept": len(which), "extra": extra}
            rows.append({"keep": keep, "form": form, **numbers})
    return rows


def summary(seeds: list[list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for i, row in enumerate(seeds[0]):
        every = [rows[i] for rows in seeds]
        numbers = {name: spread(one[name] for one in every) for name in ("iia", "kl")}
        rows.append({**{k: row[k] for k in ("keep", "form", "kept", "extra")}, "ours": numbers, "seeds": every})
    return rows


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for keep in dict.fromkeys(row["keep"] for row in rows):
        by_form = {row["form"]: row["seeds"] for row in rows if row["keep"] == keep}
        for number, relation in (("iia", ">"), ("kl", "<")):
            estimate = difference(by_form["affine, more units"], by_form["network"], number)
            name = f"keep {keep}: affine with more units − network of as many weights, {number}"
            rows.append({**claim(name, estimate.value, relation, 0.0), "difference": estimate.to_json()})
    return rows


def body(record: Record) -> str:
    cells = [
        (str(row["keep"]), row["form"], str(row["kept"]), *("{:.3f} ± {:.3f}".format(*row["ours"][n]) for n in ("iia", "kl")))
        for row in record["rows"]
    ]  # fmt: skip
    return "\n".join(
        (table(("keep", "what stands for the others", "kept", "IIA", "KL"), cells), claims(record["claims"]))
    )


SECTIONS = (
    Section(
        "mechanisms",
        "Learned mechanisms that are not affine",
        """Boolean circuit, six seeds, the units that *joint, learned on swaps* keeps; ten times 2000 swaps. *network*: {hidden} hidden ReLU units of the
kept ones beside the folded head, trained on swaps. It cannot be folded and stays as nodes with weights of its own; *affine, more units*
has about as many weights in all, spent on units of the network that stay as they are.
""",
        body,
    ),
)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "mechanisms.json")
    use_threads(options.threads)
    resumed, quick = Resumed(options.json), options.quick
    make, seeds = (small, range(2)) if quick else (boolean, range(SEEDS))
    swaps, steps = (200, 100) if quick else (SWAPS, STEPS)
    measured = [
        resumed(f"seed {seed}", lambda seed=seed: measure(make(seed), swaps, steps))
        for seed in progress(seeds, f"{len(seeds)} seeds")
    ]
    rows = summary(measured)
    for row in rows:
        print(row["keep"], row["form"], row["kept"], row["ours"])
    write_record(options.json, "mechanisms", [], options, rows=rows, claims=judged(rows), hidden=HIDDEN)
    resumed.forget()


if __name__ == "__main__":
    main()
