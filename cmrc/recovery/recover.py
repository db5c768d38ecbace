"""`cmrc.recover(program, lowered, data)`: train a lowered model for a while towards the original, without labels.

    loss = distance of the outputs + `values` · distance of inner values + `labels` · cross-entropy (where data have labels)

The rate rises over the first tenth of the time and falls to nothing along a half cosine. Held-out data, which are never trained
on, are judged twenty times on the way. After three rounds without a better one the run goes back to the best, and continues at a third of
the rate: a rate that is too high for a network only costs some rounds. The parameters that the model began with are
the first candidate, so the result is never worse on the held-out data.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from cmrc.errors import InputError
from cmrc.hosts.protocols import Host, Learner, Lesson, Teaching
from cmrc.ir.graph import Array
from cmrc.program.lower import Lowered, Recovery
from cmrc.program.program import Program
from cmrc.recovery.lessons import Pool, PoolRows, Teacher, own_rows
from cmrc.recovery.parameters import compared, folded, trainable
from cmrc.recovery.refits import refitted
from cmrc.recovery.saving import Saved, read
from cmrc.statistics import distributed
from cmrc.statistics.batches import fixed_batch

Item = TypeVar("Item")

ROUNDS = 20
WARM = 0.1  # of the time
PATIENCE = 3  # rounds without a better one, after which the run goes on from the best, and slower
SLOWER = 1 / 3
SLOWEST = 0.03  # of the rate; nothing more is expected then
RATE = 0.01
VALUES = 0.3
INSIDE = 0.3  # of the time, in which inner values are compared: they lead the way, and the outputs decide
LABELS = 0.3
LOSSES = ("auto", "kl", "squared-error")


@dataclass(frozen=True, slots=True)
class Round:
    """Where a run stands after a round: the share of the budget that is used, and the loss on held-out data."""

    number: int
    step: int
    share: float
    training: float  # mean loss of the round's steps
    held_out: float
    best: float
    began: float


def recover(
    program: Program,
    lowered: Lowered,
    data: Any,
    *,
    minutes: float = 10.0,
    steps: int | None = None,
    held_out: Any = None,
    train: Literal["all", "folded"] = "all",
    loss: str = "auto",
    batch: int = 32,
    refit: bool = True,
    rate: float = RATE,
    values: float = VALUES,
    labels: float = LABELS,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    tell: Callable[[Round], None] = lambda round: None,
    clock: Callable[[], float] = time.monotonic,
    spread: bool = False,
) -> Lowered:
    """A lowered model whose weights were trained for some minutes towards the original, on unlabelled data.

    `data` is what `cmrc.calibrate` takes; a tenth of it is held out unless `held_out` is given. `train` is what is trained: all
    weights and biases, or only those that lowering made or changed. `loss` compares the outputs: "kl" for classes,
    "squared-error" for anything else, "auto" decides. `values` and `labels` weigh the distance of inner values and, where the
    data have labels, the cross-entropy; 0 leaves them out. Batch norm keeps its statistics. Before the first step every affine
    op is fitted to the original by least squares (`refit`), which takes seconds.

    With `steps` instead of `minutes` the result follows from the seed alone. `checkpoint` names a file from which a run that was
    interrupted goes on. `tell` hears of every round. The result's `recovery` says what was reached; a recovered model is no
    longer equal to the original with its units replaced, and `check` says so.

    `spread` is for processes that torchrun started, all of which call this: each computes with its rows of every batch, all take the
    same steps, those of one process up to rounding, and all return the same model.
    """
    if loss not in LOSSES:
        raise InputError(f"loss={loss!r} is not known", fix=f"use one of {', '.join(LOSSES)}")
    if train not in ("all", "folded"):
        raise InputError(f"train={train!r} is not known", fix="use all or folded")
    if minutes <= 0 or (steps is not None and steps <= 0):
        raise InputError("there is no time to recover in", fix="give minutes= or steps= above 0")
    run = RecoveryRun.start(
        program.host,
        lowered.host,
        _pools(program.host, data, held_out, batch, seed),
        train,
        RecoveryOptions(
            loss, rate, values, labels, seed, None if steps else 60.0 * minutes, steps, refit, _mask_of(lowered)
        ),
        None if checkpoint is None else Path(checkpoint),
        (lambda: distributed.from_first(clock)) if spread else clock,
        distributed.shard() if spread else (0, 1),
    )
    run.go(tell)
    host = lowered.host.with_parameters(run.best) if run.is_better else lowered.host
    return replace(lowered, host=host, recovery=run.recovery())


def _mask_of(lowered: Lowered) -> str:
    """The mask that says which positions count, where the model was planned with one."""
    positions = lowered.plan.made.get("recipe", {}).get("positions")
    return positions if isinstance(positions, str) else ""


def _pools(host: Host, data: Any, held_out: Any, batch: int, seed: int) -> tuple[Pool, Pool]:
    pool = Pool.read(data, host, batch)
    return pool.split(seed) if held_out is None else (pool, Pool.read(held_out, host, batch))


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    loss: str
    rate: float
    values: float
    labels: float
    seed: int
    seconds: float | None
    steps: int | None
    refit: bool
    mask: str


@dataclass(slots=True, eq=False)
class RecoveryRun:
    """One recovery: its fixed settings, and its progress."""

    learner: Learner
    teacher: Teacher
    teaching: Teaching
    train: Pool
    judged: list[Lesson]
    options: RecoveryOptions
    path: Path | None
    asked: str
    clock: Callable[[], float]
    shard: tuple[int, int]  # which process this is, of how many
    step: int = 0
    spent: float = 0.0
    rounds: int = 0
    since_best: int = 0
    slower: float = 1.0
    began: float = 0.0
    best_loss: float = 0.0
    refitted: float | None = None  # the loss after the least squares
    best: dict[str, Array] = field(default_factory=dict)
    started: float = 0.0

    @classmethod
    def start(
        cls,
        original: Host,
        small: Host,
        pools: tuple[Pool, Pool],
        train: str,
        options: RecoveryOptions,
        path: Path | None,
        clock: Callable[[], float],
        shard: tuple[int, int],
    ) -> RecoveryRun:
        chosen = folded(original.graph, small.graph) if train == "folded" else trainable(small.graph)
        if not chosen:
            raise InputError("the model has no parameters to train", fix='train="all"')
        pool, apart = pools
        use_labels = bool(options.labels) and pool.has_labels
        teacher = Teacher(original, compared(original, small) if options.values else (), use_labels, len(pool))
        judged = teacher.judged(apart)
        if shard[1] > 1:
            _require_rows(small, judged)
        teaching = Teaching(_kinds(judged[0].outputs, options.loss), options.values, options.labels)
        learner = small.learner(list(chosen))
        asked = _digest(options, list(chosen), teacher, pool, judged)
        run = cls(learner, teacher, teaching, pool, judged, options, path, asked, clock, shard)
        run.started = clock()
        saved = None if path is None else run.from_first(lambda: read(path, asked))
        if saved is not None:
            run.resume(saved)
        else:
            run.began = run.best_loss = run.judge()
            run.best = learner.parameters()
            if options.refit:
                run.refit(
                    run.from_first(
                        lambda: refitted(original, small, pool, chosen, mask=options.mask, seed=options.seed)
                    )
                )
        return run

    def from_first(self, make: Callable[[], Item]) -> Item:
        """What the first of the processes makes of it; unlike processors round unlike."""
        return make() if self.shard[1] == 1 else distributed.from_first(make)

    def refit(self, fitted: dict[str, Array]) -> None:
        """Take what least squares found, if it is better on the held-out data."""
        before = {f"parameter:{name}": array for name, array in self.best.items()}
        self.learner.restore(before | {f"parameter:{name}": array for name, array in fitted.items()})
        self.refitted = self.judge()
        if self.refitted < self.best_loss:
            self.best_loss, self.best = self.refitted, self.learner.parameters()
        else:
            self.learner.restore(before)

    # ------------------------------------------------------------ the way

    def go(self, tell: Callable[[Round], None]) -> None:
        losses: list[float] = []
        last = self.share
        for rows in self._rows():
            loss = self._learn(rows, self.share)
            self.step += 1
            losses.append(loss)
            if not math.isfinite(loss):
                self.go_back()
                losses.clear()
            if self.share < 1.0 and self.share - last < 1.0 / ROUNDS:
                continue
            last = self.share
            held_out = self.judge()
            self.rounds += 1
            self.since_best += 1
            if held_out < self.best_loss:
                self.best_loss, self.best, self.since_best = held_out, self.learner.parameters(), 0
            training = float(np.mean(losses)) if losses else math.nan
            losses = []
            tell(Round(self.rounds, self.step, min(self.share, 1.0), training, held_out, self.best_loss, self.began))
            if self.since_best >= PATIENCE:
                self.go_back()
            if self.share >= 1.0 or self.slower < SLOWEST:
                break
            self.save()
        if self.path is not None and not self.shard[0]:
            self.path.unlink(missing_ok=True)

    def _learn(self, rows: PoolRows, share: float) -> float:
        """A step with a batch; of several processes each takes its rows."""
        if self.shard[1] == 1:
            lesson = self.teacher.teach(rows, values=share < INSIDE)
            return self.learner.step(lesson, self.teaching, self.rate(share))
        own, counts = own_rows(rows, *self.shard)
        lesson = replace(self.teacher.teach(own, values=share < INSIDE), counts=counts)
        return self.learner.step(lesson, self.teaching, self.rate(share), distributed.total)

    def go_back(self) -> None:
        """Go back to the best parameters so far, and continue from there at a lower rate."""
        self.learner.restore({f"parameter:{name}": array for name, array in self.best.items()})
        self.since_best, self.slower = 0, self.slower * SLOWER

    def _rows(self) -> Iterator[PoolRows]:
        """Batches from where the run stands, epoch after epoch."""
        per_epoch = sum(1 for _ in self.train.epoch(0, self.options.seed))
        number, skip = divmod(self.step, per_epoch)
        while True:
            for i, rows in enumerate(self.train.epoch(number, self.options.seed)):
                if i >= skip:
                    yield rows
            number, skip = number + 1, 0

    @property
    def share(self) -> float:
        """How much of the budget is used."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        assert self.options.seconds is not None
        return (self.spent + self.clock() - self.started) / self.options.seconds

    def rate(self, share: float) -> float:
        highest = self.options.rate * self.slower
        if share < WARM:
            return highest * (share + 0.01) / (WARM + 0.01)
        return highest * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (share - WARM) / (1.0 - WARM))))

    def judge(self) -> float:
        """The mean loss on the held-out data."""
        rank, world = self.shard
        pairs = [self.learner.loss(lesson, self.teaching) for lesson in self.judged[rank::world]]
        pairs = pairs if world == 1 else [pair for own in distributed.from_each(pairs) for pair in own]
        loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        return loss if math.isfinite(loss) else math.inf

    # ------------------------------------------------------------ what is kept

    def save(self) -> None:
        if self.path is None:
            return
        spent = self.spent + self.clock() - self.started
        if self.shard[0]:
            return
        counts = {
            "step": self.step, "spent": spent, "rounds": self.rounds,
            "since_best": self.since_best, "slower": self.slower, "began": self.began, "best_loss": self.best_loss,
            "refitted": self.refitted,
        }  # fmt: skip
        Saved(counts, self.learner.state(), self.best).write(self.path, self.asked)

    def resume(self, saved: Saved) -> None:
        self.step, self.rounds = int(saved.counts["step"]), int(saved.counts["rounds"])
        self.since_best, self.spent = int(saved.counts["since_best"]), float(saved.counts["spent"])
        self.slower = float(saved.counts["slower"])
        self.began, self.best_loss = float(saved.counts["began"]), float(saved.counts["best_loss"])
        self.refitted = saved.counts["refitted"]
        self.best = dict(saved.best)
        self.learner.restore(saved.state)

    @property
    def is_better(self) -> bool:
        return self.best_loss < self.began

    def recovery(self) -> Recovery:
        return Recovery(
            losses=tuple(kind for kind in self.teaching.losses if kind),
            before=self.began,
            after=self.best_loss,
            refitted=self.refitted,
            steps=self.step,
            seconds=self.spent + self.clock() - self.started,
            samples=len(self.train),
            held_out=sum(len(lesson.outputs[0]) for lesson in self.judged),
            seed=self.options.seed,
            trained=tuple(self.best) if self.is_better else (),
            labels=self.teacher.trains_on_labels,
            stopped_at=self.learner.stopped_at,
        )


def _require_rows(host: Host, judged: Sequence[Lesson]) -> None:
    """That a batch can be shared out: the model takes any number of rows, and answers each by itself."""
    if fixed_batch(host.graph.inputs) or any(not output.ndim for lesson in judged for output in lesson.outputs):
        raise InputError(
            "several processes share out the rows of a batch, and this model takes a fixed number of rows, or gives one number for all",
            fix="export it with a dynamic batch axis, or recover it in one process",
        )


def _kinds(outputs: Sequence[Array], loss: str) -> tuple[str, ...]:
    """How each output is compared: floating rows of several numbers as classes, unless they are all of one length."""
    kinds = []
    for output in outputs:
        classes = output.ndim in (2, 3) and output.shape[-1] > 1 and not _is_embedding(output)
        kind = loss if loss != "auto" else "kl" if classes else "squared-error"
        kinds.append(kind if output.dtype.kind == "f" or output.dtype.name == "bfloat16" else "")
    return tuple(kinds)


def _is_embedding(output: Array) -> bool:
    """Rows of one length, which do not add up to one: directions, and no classes."""
    lengths = np.linalg.norm(output.astype(np.float64), axis=-1)
    same = bool(np.allclose(lengths, lengths.flat[0], rtol=1e-3))
    return same and lengths.size > 1 and not np.allclose(output.sum(-1), 1.0, atol=1e-3)


def _digest(
    options: RecoveryOptions, trained: Sequence[str], teacher: Teacher, train: Pool, judged: Sequence[Lesson]
) -> str:
    """Of everything that a resumed run must share with the one that was interrupted."""
    digest = hashlib.sha256(repr((options, sorted(trained), teacher.values, len(train), train.size)).encode())
    for lesson in judged:
        for array in (*lesson.inputs.values(), *lesson.outputs):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
