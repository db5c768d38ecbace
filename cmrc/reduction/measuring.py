"""What one size of a model costs and how well it answers: everything that a goal can ask about.

Quality is measured on held-out rows, against the original model. The bound on agreement holds for the population of the rows
with probability 1 − δ. Speed is that of both files in one process, in turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from cmrc.errors import InputError, VerifyError
from cmrc.ir.graph import Array
from cmrc.program.lower import Lowered, plan_digest
from cmrc.program.program import Program
from cmrc.reduction.goals import Quality
from cmrc.reduction.samples import Rows, padded_again
from cmrc.verification.bounds import Estimate, bootstrap, lower_mean
from cmrc.verification.evidence import Evidence, Readout, compare
from cmrc.verification.interpreter import Interpreter
from cmrc.verification.result import Plain

Metric = Callable[..., Any]
NEAR = 0.1  # of the spread of the outputs: values that lie apart by less agree, where nothing else is said
TINY = 1e-12  # the least probability whose logarithm is taken
EMBEDDING = "embedding"
READ_AS = ("classes", "binary", "values", EMBEDDING)
ANCHORS = 512  # samples of the calibration data among which the nearest is looked for
SMALL = 2**26  # bytes of answers that are kept
SCALE = 20.0  # of cosines as logits, the usual one of sentence encoders


class Judge:
    """The original on held-out rows, run once; every reduced model is held against it.

    An embedding has no answer of its own. What it is for is to find what is near, so its answer is which of the `others`
    (calibration rows, as the original embeds them) is nearest. Often several are about as near, and then it means nothing which of
    them comes first: both models agree where the one that the reduced model finds is, for the original, no further than the
    nearest, up to a tenth of the spread of the cosines.
    """

    def __init__(
        self,
        program: Program,
        rows: Rows,
        *,
        others: Rows | None = None,
        metric: Metric | None = None,
        delta: float = 0.05,
        answer: str | int | None = None,
        reads: str | None = None,
        class_axis: int = -1,
        tolerance: float | None = None,
    ) -> None:
        if reads not in (None, *READ_AS):
            raise VerifyError(f"outputs cannot be read as {reads!r}", fix=f"give reads= one of {', '.join(READ_AS)}")
        self.program, self.metric, self.delta, self.rows = program, metric, delta, rows
        everything = rows.all()
        self.labels = everything.pop("labels", None)
        self.inputs = {value.name: everything[value.name] for value in program.graph.inputs}
        self.outputs = self._answers(program, rows)
        self._known: dict[str, list[Array]] = {}  # by plan: what its model answers
        self.remarks: list[str] = []
        self.output = self._output(answer)
        self.anchors: Array | None = None
        self.slack = 0.0  # by which cosines may differ and be as near
        self.are_probabilities = False
        if others is not None and (
            reads == EMBEDDING or (reads is None and _are_unit_vectors(self.outputs[self.output]))
        ):
            few = replace(others, numbers=np.sort(others.numbers)[:ANCHORS])
            few = few.trimmed() if others.is_trimmed else few
            self.anchors = self._vectors(self._answers(program, few)[self.output], few.all())
            cosines = self._logits(self.outputs[self.output]) / SCALE
            self.slack = NEAR * float(cosines.std()) if tolerance is None else tolerance
            reads, tolerance = "classes", None
            self.remarks.append(
                f"the output is an embedding: two models agree on a sample if what the small one finds nearest among {len(self.anchors)} "
                f"calibration samples is as near for the original as its own nearest, up to a cosine of {self.slack:.2g}; say "
                "tolerance= for another"
            )
        self.readout = self._readout(reads, class_axis, tolerance)
        self.are_probabilities = (
            self.anchors is None
            and self.readout.kind == "classes"
            and _are_probabilities(self.outputs[self.output], class_axis)
        )
        self.truth = self._truth()
        self.counted = self._counted()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def _answers(self, program: Program, rows: Rows) -> list[Array]:
        """The outputs for all rows. Texts are run without what only pads them; where an output has tokens, zeros take its place."""
        names, interpreter = [value.name for value in program.graph.inputs], Interpreter(program)
        if not rows.is_trimmed:
            everything = rows.all()
            return interpreter.run({name: everything[name] for name in names})
        shapes = [program.graph.values()[name].shape for name in program.graph.outputs]
        sized = [len(shape) > 1 and isinstance(shape[1], str) for shape in shapes]
        parts = []
        for span, batch in rows.with_spans():
            outputs = interpreter.run({name: batch[name] for name in names})
            parts.append([padded_again(a, span) if known else a for a, known in zip(outputs, sized, strict=True)])
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _output(self, asked: str | int | None) -> int:
        names = self.program.graph.outputs
        if isinstance(asked, str) and asked not in names:
            raise VerifyError(f"the model has no output {asked!r}", fix=f"give answer= one of {', '.join(names)}")
        if asked is not None:
            return names.index(asked) if isinstance(asked, str) else asked
        if len(names) > 1:
            self.remarks.append(f"of {len(names)} outputs {names[0]!r} is judged: give answer= for another")
        return 0

    def _counted(self) -> Array | None:
        """Which tokens of each row count, where the model answers token by token and the rows are padded."""
        name = self.rows.samples.mask
        if (
            name is None
            or self.readout.logits(self._logits(self.outputs[self.output])).shape[:2] != self.inputs[name].shape
        ):
            return None
        return self.inputs[name].astype(bool)

    def _vectors(self, output: Array, inputs: Mapping[str, Array]) -> Array:
        """One unit vector per row: the mean over the tokens that count, of an output with one vector per token."""
        if output.ndim > 2:
            name = self.rows.samples.mask
            steps = output.reshape(len(output), -1, output.shape[-1])
            weight = np.ones(steps.shape[:2]) if name is None else inputs[name]
            output = (steps * weight[..., None]).sum(1) / weight.sum(1)[:, None]
        return np.asarray(output / np.maximum(np.linalg.norm(output, axis=1, keepdims=True), TINY))

    @property
    def near(self) -> float:
        """How far values may lie apart and still agree, where nobody says."""
        return NEAR * float(self.outputs[self.output].astype(np.float64).std()) or 1e-6

    def _readout(self, reads: str | None, axis: int, tolerance: float | None) -> Readout:
        shape = self._logits(self.outputs[self.output]).shape
        if reads is None and tolerance is None and (len(shape) < 2 or shape[axis] == 1):
            near = self.near
            self.remarks.append(
                f"the output is one number per answer: answers agree if they lie within {near:.3g}, a tenth of their "
                "spread; say tolerance= for another, or reads=binary for a logit"
            )
            return Readout.of(shape, "values", axis, near)
        return Readout.of(shape, reads, axis, tolerance)

    def _truth(self) -> Array | None:
        """The labels as [rows, answers] where they name classes of the output."""
        if self.labels is None or self.readout.kind == "values" or self.anchors is not None:
            return None
        logits = self.readout.logits(self.outputs[self.output])
        classes = np.asarray(self.labels).reshape(len(self.labels), -1)
        fits = classes.shape == logits.shape[:2] and classes.min() >= 0 and classes.max() < logits.shape[2]
        if not fits:
            self.remarks.append("the labels do not name classes of the output: no accuracy is measured")
            return None
        return classes

    @cached_property
    def _of_original(self) -> Array | None:
        return None if self.metric is None else self._score(self.outputs)

    def _logits(self, output: Array) -> Array:
        """What is compared: of probabilities their logarithms, so that KL means what it says; of embeddings what is near."""
        if self.anchors is not None:
            return np.asarray(SCALE * self._vectors(output, self.inputs) @ self.anchors.T)
        return np.log(np.maximum(output, TINY)) if self.are_probabilities else output

    def evidence(self, after: Sequence[Array]) -> Evidence:
        """Answer by answer: whether both agree, the original's margin, and how far the logits moved."""
        z, other = self._logits(self.outputs[self.output]), self._logits(after[self.output])
        evidence = compare(self.readout, z, other, self.counted, np.zeros(len(z), dtype=np.float32))
        return evidence if self.anchors is None else replace(evidence, agree=self._finds_as_near(z, other))

    def _finds_as_near(self, z: Array, other: Array) -> Array:
        """By row, whether the original is about as near to what the reduced model finds nearest as to its own nearest."""
        nearest = np.take_along_axis(z, other.argmax(axis=1)[:, None], axis=1)
        return np.asarray(z.max(axis=1, keepdims=True) - nearest <= SCALE * self.slack)

    def run(self, lowered: Lowered) -> list[Array]:
        """What a small model answers; kept for a model that was only lowered, as long as the answers are small."""
        plan = plan_digest(lowered.plan) if lowered.recovery is None else None
        if plan is not None and plan in self._known:
            return self._known[plan]
        answers = self._answers(Program(lowered.host), self.rows)
        if plan is not None and sum(array.nbytes for array in answers) <= SMALL:
            self._known[plan] = answers
        return answers

    def quality(self, lowered: Lowered) -> Quality:
        after = self.run(lowered)
        z, other = self._logits(self.outputs[self.output]), self._logits(after[self.output])
        evidence = self.evidence(after)
        plain = Plain(evidence, None, None)
        accuracy, drop = None, None
        if self.truth is not None:
            right = [evidence.mean(self.readout.logits(a).argmax(axis=2) == self.truth) for a in (z, other)]
            accuracy = (float(right[0].mean()), float(right[1].mean()))
            drop = bootstrap(right[0] - right[1])
        metric = None
        if self._of_original is not None:
            before, now = self._of_original, self._score(after)
            metric = (float(before.mean()), float(now.mean()))
            drop = bootstrap(before - now) if len(before) > 1 else Estimate(metric[0] - metric[1], np.nan, np.nan)
        bound = lower_mean(plain.values("agreement"), self.delta, binary=evidence.binary)
        kl = None if self.readout.kind == "values" else float(evidence.mean(evidence.kl).mean())
        change = float(((other.astype(np.float64) - z) ** 2).sum()) / max(
            float((z.astype(np.float64) ** 2).sum()), 1e-30
        )
        return Quality(plain.agreement, bound, kl, 1 - change, accuracy, metric, drop)

    def about_embeddings(self, after: Sequence[Array]) -> str | None:
        """Of embeddings, how near they are to those of the original, and how often the very same sample is nearest."""
        if self.anchors is None:
            return None
        before, now = (self._vectors(outputs[self.output], self.inputs) for outputs in (self.outputs, after))
        cosine = float((before * now).sum(axis=1).mean())
        same = float(((before @ self.anchors.T).argmax(axis=1) == (now @ self.anchors.T).argmax(axis=1)).mean())
        return (
            f"the embeddings have a mean cosine of {cosine:.4f} with those of the original; for {100 * same:.1f} % of the samples the "
            "very same one is nearest"
        )

    def _score(self, outputs: Sequence[Array]) -> Array:
        """The user's metric: one number, or one per row; higher is better."""
        assert self.metric is not None
        given = outputs[0] if len(outputs) == 1 else list(outputs)
        takes = len(inspect.signature(self.metric).parameters)
        try:
            score = np.asarray(self.metric(given) if takes == 1 else self.metric(given, self.labels), dtype=np.float64)
        except Exception as error:  # the function is the user's own
            raise InputError(
                f"the metric failed: {type(error).__name__}: {error}",
                fix="it gets the outputs and, as a second argument, the labels; it returns one number, or one per row",
            ) from error
        if score.shape not in ((), (len(self),)) or not np.isfinite(score).all():
            raise InputError(
                f"the metric returned an array of shape {list(score.shape)}, or numbers that are not finite",
                fix="return one number, or one per row",
            )
        return score.reshape(-1)


def _are_unit_vectors(output: Array) -> bool:
    """Rows of length 1 on both sides of 0, as an encoder gives that normalises them."""
    length = np.linalg.norm(output.reshape(len(output), -1), axis=1)
    return bool(output.ndim == 2 and output.shape[1] > 1 and (output < 0).any() and np.allclose(length, 1, atol=1e-3))


def _are_probabilities(output: Array, axis: int) -> bool:
    return bool(output.ndim > 1 and (output >= 0).all() and np.allclose(output.sum(axis), 1, atol=1e-3))
