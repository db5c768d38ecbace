"""What every host must offer (`Host`), and what only some hosts offer: ask with `isinstance(host, Trainable)`, never by attribute.

A host reads its graph into the IR (`Host.graph`), writes a changed IR into a clone of itself (`Host.build`), and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from cmrc.ir.graph import Array, Graph

if TYPE_CHECKING:
    import torch


LOSSES = ("cross-entropy", "kl", "logit", "squared-error")
LABELLED = ("cross-entropy", "squared-error")


@dataclass(frozen=True, slots=True, eq=False)
class DerivativesRequest:
    """One batch, the values with respect to which to differentiate, and how: `curvature` is auto, full, gauss-newton or monte-carlo.

    `seed` belongs to this batch; `draws` is used by monte-carlo only. `factors` also asks for the B of H = Σ BᵀB.
    """

    inputs: Sequence[Any] | Mapping[str, Any]
    labels: Array | None
    values: tuple[str, ...]
    loss: str
    curvature: str
    draws: int
    seed: int
    factors: bool

    @property
    def labelled(self) -> bool:
        return self.loss in LABELLED


@dataclass(frozen=True, slots=True, eq=False)
class Derivatives:
    """The derivatives at one value for one batch, in the value's own shape. `factors` are empty unless they were asked for."""

    value: Array
    gradient: Array
    curvature: Array
    factors: list[Array]
    how: str


class Piece(Protocol):
    """A part of a model between two cuts, ready to run. It reads `inputs`, and only the shapes of `sizes`."""

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def sizes(self) -> tuple[str, ...]: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """One batch with a teacher's answers: its outputs, some of its inner values, and labels if there are any.

    A lesson that does not `count` stands for no rows, where a process has none of a batch.
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[Array]
    values: Mapping[str, Array]
    labels: Array | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Teaching:
    """What is learned. `losses` has the loss of each output against the teacher's: "kl", "squared-error", or "" for none.

    A squared error is relative to the variance of the teacher's output. `values` is the weight of all inner values together, `labels`
    that of the labels.
    """

    losses: tuple[str, ...]
    values: float
    labels: float


Total = Callable[[Array], Array]
"""Adds arrays of one shape up over the processes that work together."""


def alone(array: Array) -> Array:
    """The total of a process that works by itself."""
    return array


Runner = Callable[[Mapping[str, Array], Sequence[str]], list[Array]]
"""Computes the outputs and some inner values, by name, from inputs by name."""


Metadata = Callable[[], Mapping[str, str]]
"""What a file says about itself. It is asked for once, perhaps by another thread: it may read every weight of the source."""


class Learner(Protocol):
    """A model in training. Norms over batches keep their statistics."""

    @property
    def stopped_at(self) -> str:
        """A node where gradients stop, with its op; empty if they reach every trained parameter."""
        ...

    def step(self, lesson: Lesson, teaching: Teaching, rate: float, total: Total = alone) -> float:
        """One step of Adam; returns the loss before it. The rate is relative to the size of each parameter's numbers.

        Where several processes learn together, each has its rows of the batch, and `total` adds arrays up over all of them. All
        then take the same step, that of the whole batch.
        """
        ...

    def loss(self, lesson: Lesson, teaching: Teaching) -> tuple[float, float]:
        """The loss of the outputs without labels, summed over the samples, and the number of samples."""
        ...

    def parameters(self) -> dict[str, Array]:
        """The trained parameters as they are now."""
        ...

    def state(self) -> dict[str, Array]:
        """The state on which the next step depends."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None:
        """Continue from such a state."""
        ...


class Host(Protocol):
    """A model that can be read as IR, patched, run and saved. Immutable: `build` and `annotate` return another host."""

    @property
    def kind(self) -> str:
        """`fx` or `onnx`."""
        ...

    @property
    def graph(self) -> Graph:
        """The model in the IR."""
        ...

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Every name by which a user may call a value (module path, node name, value name), with the values that it names."""
        ...

    @property
    def inputs(self) -> Sequence[str]:
        """The names of the model's inputs, in order."""
        ...

    def contradiction(self) -> str:
        """What the framework itself finds wrong with the model, in one line; empty if the model is valid."""
        ...

    def details(self) -> Mapping[str, str]:
        """A description of each node besides its operands (op, attributes, bodies), by its origin: it distinguishes models."""
        ...

    def build(self, graph: Graph) -> Self:
        """A clone of this host that computes `graph`: an edited form of `self.graph`, do and select nodes included."""
        ...

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        """The outputs for one batch, as numpy arrays, then the tapped values by name."""
        ...

    def runner(self) -> Runner:
        """`run` for many batches in a row; the host may prepare for them. The numbers may differ from those of `run` by rounding."""
        ...

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        """The inputs of the IR by name, from what a user gives to `run`."""
        ...

    def extract(self, inputs: Sequence[str], outputs: Sequence[str], *, beyond: Collection[str] = ()) -> Piece:
        """The part of the model that computes some of its values from others, without running anything before them.

        It may read the sizes of values `beyond` the cut; `Piece.sizes` then names these values.
        """
        ...

    def differentiate(self, request: DerivativesRequest) -> list[Derivatives]:
        """The derivatives of a loss by inner values, for one batch. Torch computes them."""
        ...

    def learner(self, trained: Collection[str]) -> Learner:
        """A copy of the model whose parameters of these names can be trained. Torch trains them."""
        ...

    def with_parameters(self, arrays: Mapping[str, Array]) -> Self:
        """A clone of this host with other numbers in some of its parameters."""
        ...

    def annotations(self) -> list[dict[str, Any]]:
        """The do's recorded on the nodes, as plan entries in JSON form, in the plan's order."""
        ...

    def annotate(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> Self:
        """A clone with plan entries (value name, JSON form) recorded on the nodes that make the values."""
        ...

    def save(
        self,
        path: Path,
        metadata: Metadata = dict,
        *,
        overwrite: bool = False,
        output_names: Sequence[str] | None = None,
    ) -> tuple[int, int] | None:
        """Write the model to `path`, completely or not at all, with these notes in it. The file that it was loaded from is overwritten only with `overwrite`.

        Returns the bytes of that file and of the new one, each with its external data; nothing if there was no such file.
        """


@runtime_checkable
class Stored(Protocol):
    """A host whose weights can be compared one by one with those of another host."""

    def unequal_stored(self, other: Host) -> tuple[str, ...] | None:
        """The weights whose numbers differ by more than a few last bits; `None` if names, shapes or types differ."""
        ...


@runtime_checkable
class Trainable(Protocol):
    """A host whose model is also a torch module."""

    def module(self) -> torch.nn.Module:
        """The model as a trainable module under its own parameter names. There is one such module, and the host then uses its weights."""
        ...

    def new_module(self, *, share: bool = False) -> torch.nn.Module:
        """Another module; with `share`, unchanged tensors share the memory of the traced model."""
        ...

    def unequal(self, other: Host) -> tuple[str, ...]:
        """The parameters and buffers whose numbers differ from those of another host."""
        ...

    def load_into(
        self, model: torch.nn.Module, *, graph: Graph, original: Host, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Write the parameters of this host, built as `graph` from `original`, into the user's own module.

        The module is run on `args` and `kwargs`, and must then compute what this host computes.
        """


@runtime_checkable
class Exports(Protocol):
    """A host whose model can be had as an ONNX model, under the same names of values."""

    def exported(self) -> Host | None:
        """That host, made once; `None` where the weights may not fit into memory."""
        ...


@runtime_checkable
class ReportsUntied(Protocol):
    """A host that reports which tied weights a patch had to separate."""

    @property
    def untied(self) -> tuple[str, ...]: ...


@runtime_checkable
class Described(Protocol):
    """A host whose model can store notes, by key."""

    @property
    def metadata(self) -> Mapping[str, str]: ...


@runtime_checkable
class Sizable(Protocol):
    """A host whose dynamic sizes can be fixed, so that the cost of a run is known."""

    def with_sizes(self, shapes: Mapping[str, Sequence[int]]) -> Self:
        """A clone whose inputs have these shapes, except for the first axis, which stays as it is."""
        ...
