"""What the pretrained networks are judged by: for each its data to calibrate on, and held-out data with real answers.

A `Subject` says which layers read the units that are cut and which layers write them; `judge` takes a way to run a model and
gives numbers, the first of which is the one that counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cmrc
from benchmarks import data, weights
from cmrc.verification.evidence import log_softmax

Run = Callable[..., np.ndarray]  # inputs of a batch to the first output
Batch = dict[str, np.ndarray]
BATCH = torch.export.Dim("batch")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CROPS = 100  # of the labelled photos


@dataclass(frozen=True)
class Subject:
    """A network, its data, and how it is judged."""

    name: str
    what: str  # what is cut, and what it is judged on
    model: nn.Module | Path
    readers: tuple[str, ...]  # layers (torch) or nodes (ONNX) that read the units, or values that hold them
    batches: list[Batch]  # to calibrate on
    judge: Callable[[Run], dict[str, float]]
    writers: tuple[str, ...] = ()  # layers that Torch-Pruning cuts for it
    losses: Callable[[nn.Module], Iterator[torch.Tensor]] = lambda model: iter(())  # of the task, for Taylor scores
    keep: float = 0.5
    batch: int = 20  # samples in a run of what it is judged on
    affine: bool = True  # whether affine maps fold here; constants only otherwise
    recipe: Mapping[str, Any] = field(default_factory=dict)
    task: bool = False  # whether gradients are cheap enough to select by the task
    exported: bool = True  # whether it is small enough to be exported, for onnxsim and as a check

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(array[:2]) for array in self.batches[0].values())

    @cached_property
    def program(self) -> cmrc.Program:
        if isinstance(self.model, Path):
            return cmrc.trace(self.model)
        shapes = {name: {0: BATCH} for name in self.batches[0]}
        return cmrc.trace(self.model, self.example, dynamic_shapes=shapes)

    @cached_property
    def sized(self) -> cmrc.Program:
        """The program at the sizes of the data, so that costs are those of a real run: plans are made for it."""
        if not isinstance(self.model, Path):
            return self.program
        return cmrc.Program(
            self.program.host.with_sizes({name: array.shape for name, array in self.batches[0].items()})
        )

    @cached_property
    def sites(self) -> list[str]:
        """The values that the readers read."""
        nodes = {node.path or node.label: node for node in self.program.graph.nodes if node.op in ("linear", "conv")}
        return [str(nodes[reader].inputs[0]) if reader in nodes else reader for reader in self.readers]


def torch_run(model: nn.Module) -> Run:
    def run(*arrays: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(*map(torch.from_numpy, arrays)).numpy()

    return run


def divergence(plain: np.ndarray, other: np.ndarray) -> float:
    """Mean KL of one model's answers to another's, over all but the last axis."""
    p, q = log_softmax(plain.astype(np.float64)), log_softmax(other.astype(np.float64))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def in_parts(run: Run, arrays: Sequence[np.ndarray], size: int) -> np.ndarray:
    parts = range(0, len(arrays[0]), size)
    return np.concatenate([run(*(array[i : i + size] for array in arrays)) for i in parts])


# ---------------------------------------------------------------- the classifier of the examples


def digits() -> Subject:
    """A small ConvNet on scikit-learn's digits, as a file: all of its inner units."""
    path = EXAMPLES / "digits.onnx"
    train, test = (np.load(EXAMPLES / f"digits_{part}.npz") for part in ("train", "test"))
    program = cmrc.trace(path)
    plain = program.run([test["images"]])[0]
    batches = [{"image": train["images"][i : i + 50]} for i in range(0, len(train["images"]), 50)]

    def judge(run: Run) -> dict[str, float]:
        answers = in_parts(run, [test["images"]], 20)
        same, right = (float((answers.argmax(1) == wanted).mean()) for wanted in (plain.argmax(1), test["labels"]))
        return {"KL": divergence(plain, answers), "agreement": same, "accuracy": right}

    return Subject(
        "Digits",
        f"half of the units of four layers; calibrated on {len(train['images'])} pictures, judged on {len(test['images'])} others",
        path,
        ("bn2", program.find("pool")[0].value, "fc2", "head"),
        batches,
        judge,
        task=True,
    )


# ---------------------------------------------------------------- EfficientNet-Lite0


def efficientnet(images: int = 240, crops: int = 160, tests: int = 300) -> Subject:
    """Half of the inner channels of every inverted residual block."""
    model, rng = weights.efficientnet(), np.random.default_rng(0)
    stored = data.cifar10_pictures()
    train = enlarge(stored["train"][rng.permutation(len(stored["train"]))[:images]])
    pictures = np.concatenate([train, photo_crops(rng, crops)])
    pictures = pictures[rng.permutation(len(pictures))]
    test = enlarge(stored["test"][rng.permutation(len(stored["test"]))[:tests]])
    labelled = data.photos()
    photos = np.stack([normalise(picture.transpose(2, 0, 1)) for picture, _ in labelled])
    labels = np.array([label for _, label in labelled])
    judged = crops_of(np.random.default_rng(2), [picture for picture, _ in labelled], CROPS)
    plain, plain_crops = (in_parts(torch_run(model), [part], 20) for part in (test, judged))
    batches = [{"inputs": pictures[i : i + 20]} for i in range(0, len(pictures), 20)]

    def judge(run: Run) -> dict[str, float]:
        answers = in_parts(run, [test], 20)
        right = float((in_parts(run, [photos], 20).argmax(1) == labels).sum())
        return {"KL": divergence(plain, answers), "agreement": float((answers.argmax(1) == plain.argmax(1)).mean()),
                "KL, crops": divergence(plain_crops, in_parts(run, [judged], 20)), "photos right": right}  # fmt: skip

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for batch in batches:
            x = torch.from_numpy(batch["inputs"])
            with torch.no_grad():
                own = model(x).argmax(1)  # there are no labels of ImageNet's classes
            yield functional.cross_entropy(module(x), own)

    blocks = range(1, 16)
    return Subject(
        "EfficientNet-Lite0",
        f"half of the inner channels of 15 blocks; calibrated on {len(pictures)} pictures (CIFAR-10 training pictures "
        f"enlarged, and crops of {sum(map(len, data.PHOTOS.values())) + 2} photos); judged on {tests} test pictures of CIFAR-10, enlarged, "
        f"and on 20 other photos, which are labelled, and {CROPS} crops of them",
        model,
        tuple(f"_blocks.{i}._project_conv" for i in blocks),
        batches,
        judge,
        tuple(f"_blocks.{i}._expand_conv" for i in blocks),
        losses,
    )


def normalise(picture: np.ndarray) -> np.ndarray:
    return ((picture.astype(np.float32) - 127) / 128).astype(np.float32)


def enlarge(pictures: np.ndarray, size: int = 224) -> np.ndarray:
    x = torch.from_numpy(pictures.astype(np.float32))
    grown = functional.interpolate(x, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 255)
    return normalise(grown.numpy())


def photo_crops(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random crops of photos that are not judged on, every other one mirrored."""
    crops = crops_of(rng, data.other_photos(), count)
    crops[1::2] = crops[1::2, :, :, ::-1]
    return crops


def crops_of(rng: np.random.Generator, sources: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Random crops of pictures, of 96 pixels and more, enlarged."""
    crops = []
    for i in range(count):
        source = sources[i % len(sources)]
        size = int(rng.integers(96, min(source.shape[:2]) + 1))
        top, left = (int(rng.integers(0, n - size + 1)) for n in source.shape[:2])
        crops.append(enlarge(source[None, top : top + size, left : left + size].transpose(0, 3, 1, 2))[0])
    return np.stack(crops)


# ---------------------------------------------------------------- text


def sentences(chapters: Sequence[str], count: int | None) -> list[str]:
    """Sentences of 8 to 40 words, in the book's order."""
    kept = []
    for text in chapters:
        for sentence in text.replace("\n", " ").split(". "):
            if 8 <= len(sentence.split()) <= 40:
                kept.append(sentence.strip() + ".")
    return kept[:count]


def minilm(count: int = 256, tests: int = 300, *, spread: bool = False) -> Subject:
    """Half of the FFN units of every layer. Sentences are the first of the book, or drawn from 60 chapters."""
    model, tokenizer = weights.minilm()
    text = data.chapters()
    every = sentences(text[:60], None if spread else count)
    order = np.random.default_rng(0).permutation(len(every))[:count] if spread else range(count)

    def encoded(texts: list[str]) -> Batch:
        tokens = tokenizer(texts, padding="max_length", max_length=64, truncation=True, return_tensors="np")
        return {"ids": tokens["input_ids"].astype(np.int64), "mask": tokens["attention_mask"].astype(np.int64)}

    train, test = encoded([every[i] for i in order]), encoded(sentences(text[70:], tests))
    batches = [{name: array[i : i + 32] for name, array in train.items()} for i in range(0, count, 32)]
    arrays = [test["ids"], test["mask"]]
    plain = in_parts(torch_run(model), arrays, 50)

    def nearest(vectors: np.ndarray) -> np.ndarray:
        return (vectors @ vectors.T - 2 * np.eye(len(vectors))).argmax(1)

    def judge(run: Run) -> dict[str, float]:
        vectors = in_parts(run, arrays, 50)
        return {"1 − cosine": float(1 - (plain * vectors).sum(1).mean()),
                "nearest sentence kept": float((nearest(plain) == nearest(vectors)).mean())}  # fmt: skip

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for batch in batches:  # which sentence comes next, among those of the batch
            vectors = module(*map(torch.from_numpy, batch.values()))
            yield functional.cross_entropy(20 * vectors[:-1] @ vectors[1:].T, torch.arange(len(vectors) - 1))

    layers = range(6)
    return Subject(
        "MiniLM-L6",
        f"half of the FFN units of 6 layers; calibrated on {count} sentences of Moby Dick's first {'60 ' if spread else ''}chapters, "
        f"judged on {tests} of its last",
        model,
        tuple(f"encoder.encoder.layer.{i}.output.dense" for i in layers),
        batches,
        judge,
        tuple(f"encoder.encoder.layer.{i}.intermediate.dense" for i in layers),
        losses,
        batch=50,
        recipe={"positions": "mask"},
    )


def windows(tokenizer: Any, chapters: Sequence[str], length: int, count: int) -> np.ndarray:
    ids = tokenizer("\n\n".join(chapters), return_tensors="np")["input_ids"][0][: length * count]
    return ids.reshape(count, length).astype(np.int64)


def smollm(count: int = 48, tests: int = 8, keep: float = 0.5) -> Subject:
    """FFN units of every layer."""
    model, tokenizer = weights.smollm()
    text = data.chapters()
    length = 256
    train, test = (windows(tokenizer, *part) for part in ((text[:60], length, count), (text[70:], length, tests)))
    batches = [{"ids": train[i : i + 4]} for i in range(0, count, 4)]
    plain = in_parts(torch_run(model), [test], 1)

    def judge(run: Run) -> dict[str, float]:
        surprise, apart, same = [], [], []
        for i in range(len(test)):
            logits = run(test[i : i + 1])[0]
            surprise.append(
                functional.cross_entropy(torch.from_numpy(logits[:-1]), torch.from_numpy(test[i, 1:])).item()
            )
            apart.append(divergence(plain[i], logits))
            same.append(float((logits.argmax(-1) == plain[i].argmax(-1)).mean()))
        return {"perplexity": float(np.exp(np.mean(surprise))), "KL": float(np.mean(apart)),
                "agreement": float(np.mean(same))}  # fmt: skip

    def losses(module: nn.Module) -> Iterator[torch.Tensor]:
        for batch in batches:
            ids = torch.from_numpy(batch["ids"])
            yield functional.cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    layers = range(30)
    return Subject(
        "SmolLM2-135M",
        f"{1 - keep:.0%} of the FFN units of 30 layers; calibrated on {count * length} tokens of Moby Dick's first chapters, "
        f"judged on {tests * length} of its last",
        model,
        tuple(f"model.model.layers.{i}.mlp.down_proj" for i in layers),
        batches,
        judge,
        tuple(f"model.model.layers.{i}.mlp.gate_proj" for i in layers),
        losses,
        keep=keep,
        batch=1,
        recipe={"drift_ridge": 1.0},  # of 0.1 and 1 the better on chapters 53 to 60, which are not judged on
        exported=False,
    )


# ---------------------------------------------------------------- files of this machine


TYPES = {
    ".py": "python", ".c": "c", ".h": "c", ".cpp": "cpp", ".hpp": "cpp", ".js": "javascript", ".ts": "typescript", ".json": "json",
    ".md": "markdown", ".html": "html", ".css": "css", ".xml": "xml", ".svg": "svg", ".sh": "shell", ".pl": "perl", ".pm": "perl",
    ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".rst": "rst", ".csv": "csv", ".png": "png", ".jpg": "jpeg", ".gif": "gif",
    ".pyc": "pythonbytecode", ".so": "elf", ".o": "elf", ".a": "ar", ".gz": "gzip", ".zip": "zip", ".ttf": "ttf", ".pdf": "pdf",
    ".npz": "npz", ".npy": "npy", ".sql": "sql", ".java": "java", ".rb": "ruby", ".tcl": "tcl", ".po": "po", ".mo": "mo", ".txt": "txt",
    ".cmake": "cmake", ".awk": "awk", ".el": "lisp", ".diff": "diff", ".tar": "tar", ".wav": "wav", ".ini": "ini", ".pem": "pem",
}  # fmt: skip


def magika(count: int = 300, tests: int = 600) -> Subject:
    """Half of the units of the first layer: what lies behind it is normalised across its units, or read whole."""
    path, names, layout = weights.magika()
    known = {suffix: label for suffix, label in TYPES.items() if label in names}
    files = machine_files(known, (count + tests) // 12)
    order = np.random.default_rng(0).permutation(len(files))
    chosen = [files[i] for i in order]
    train, test = chosen[: len(chosen) // 3][:count], chosen[len(chosen) // 3 :][:tests]
    labels = np.array([names.index(known[file.suffix]) for file in test])
    x = np.stack([file_features(file, layout) for file in test])
    calibration = np.stack([file_features(file, layout) for file in train])
    program = cmrc.trace(path)
    entry = program.host.inputs[0]
    plain = in_parts(lambda part: program.run([part])[0], [x], 20)

    def judge(run: Run) -> dict[str, float]:
        answers = in_parts(run, [x], 20)
        kl = float((plain * (np.log(plain + 1e-12) - np.log(answers + 1e-12))).sum(1).mean())  # it gives probabilities
        return {"KL": kl, "agreement": float((answers.argmax(1) == plain.argmax(1)).mean()),
                "types right": float((answers.argmax(1) == labels).mean())}  # fmt: skip

    site = next(site for site in program.sites(folds=False) if site.value.endswith("ApplyActivation_0/Mul_5:0"))
    return Subject(
        "Magika",
        f"half of the 64 units of the first layer; calibrated on {len(train)} files of this machine, judged on {len(test)} others "
        f"of {len(set(labels.tolist()))} types, by their suffix",
        path,
        (site.value,),
        [{entry: calibration[i : i + 20]} for i in range(0, len(calibration), 20)],
        judge,
        affine=False,
    )


def machine_files(suffixes: Mapping[str, str], most: int) -> list[Path]:
    """Files of each suffix under the places where software lies, at most so many of one."""
    by_suffix: dict[str, list[Path]] = {suffix: [] for suffix in suffixes}
    for root in (Path(sys.prefix), Path(sys.base_prefix), Path("/usr/lib"), Path("/usr/share"), Path("/usr/include")):
        for path in sorted(root.rglob("*")) if root.exists() else ():
            paths = by_suffix.get(path.suffix)
            if paths is not None and len(paths) < 40 * most and path.is_file() and path.stat().st_size >= 64:
                paths.append(path)
    rng = np.random.default_rng(0)
    return [paths[i] for paths in by_suffix.values() for i in rng.permutation(len(paths))[:most]]


def file_features(path: Path, layout: Mapping[str, Any]) -> np.ndarray:
    """The first and the last bytes without the blanks around them, as Magika reads a file."""
    block, begin, end, blank = (layout[key] for key in ("block_size", "beg_size", "end_size", "padding_token"))
    with path.open("rb") as file:
        first = file.read(block).lstrip()[:begin]
        file.seek(max(0, path.stat().st_size - block))
        last = file.read(block).rstrip()[-end:]
    features = np.full(begin + end, blank, dtype=np.int32)
    features[: len(first)] = np.frombuffer(first, dtype=np.uint8)
    features[len(features) - len(last) :] = np.frombuffer(last, dtype=np.uint8)
    return features


# ---------------------------------------------------------------- lines of text


def recogniser(count: int = 160, tests: int = 200, keep: float = 0.5) -> Subject:
    """The units of every site of PP-OCR's recogniser that folds."""
    path = weights.recogniser()
    program = cmrc.trace(path)
    text = data.chapters()
    train, test = (lines(part, number) for part, number in ((text[:60], count), (text[70:], tests)))
    pictures, calibration = drawn(test, 1), drawn(train, 0)
    alphabet = ["", *alphabet_of(path), " "]
    entry = program.host.inputs[0]

    def strings(answers: np.ndarray) -> list[str]:
        read = []
        for row in answers.argmax(2):
            kept = [c for i, c in enumerate(row) if c and (i == 0 or c != row[i - 1])]
            read.append("".join(alphabet[c] for c in kept))
        return read

    plain = in_parts(lambda part: program.run([part])[0], [pictures], 20)
    own = strings(plain)

    def judge(run: Run) -> dict[str, float]:
        answers = in_parts(run, [pictures], 20)
        read = strings(answers)
        kl = float((plain * (np.log(plain + 1e-12) - np.log(answers + 1e-12))).sum(2).mean())  # it gives probabilities
        wrong = sum(map(distance, read, test)) / sum(map(len, test))
        return {"KL": kl, "strings as before": float(np.mean([a == b for a, b in zip(read, own, strict=True)])),
                "character errors": wrong}  # fmt: skip

    return Subject(
        "PP-OCRv4 rec",
        f"{1 - keep:.0%} of the units of every site of 32 units or more that folds into one op; calibrated on {count} drawn lines "
        f"of Moby Dick's first chapters, judged on {tests} of its last",
        path,
        tuple(folding_readers(program)),
        [{entry: calibration[i : i + 20]} for i in range(0, len(calibration), 20)],
        judge,
        keep=keep,
    )


def folding_readers(program: cmrc.Program, least: int = 32) -> Iterator[str]:
    """Affine ops that alone read units which fold into them, constants and affine maps alike."""
    for site in program.sites(folds=False):
        readers = program.consumers[site.value]
        if len(readers) == 1 and readers[0].op in ("linear", "conv") and site.units >= least:
            name = readers[0].path or readers[0].label
            if program.describe(site).folds == f"folds into {readers[0].label}":
                yield name


def alphabet_of(path: Path) -> list[str]:
    import onnx

    entries = onnx.load(path).metadata_props
    return next(entry.value for entry in entries if entry.key == "character").splitlines()


def lines(chapters: Sequence[str], count: int) -> list[str]:
    """Pieces of two to four words."""
    words = " ".join(chapters).split()
    rng, pieces, i = np.random.default_rng(0), [], 0
    while len(pieces) < count:
        step = int(rng.integers(2, 5))
        piece = " ".join(words[i : i + step])
        i += 7 * step
        if piece.isascii() and len(piece) <= 26:
            pieces.append(piece)
    return pieces


def drawn(texts: Sequence[str], seed: int) -> np.ndarray:
    """Each line drawn in one of matplotlib's fonts, dark on light, 48 pixels high: [count, 3, 48, 384] from -1 to 1."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    fonts = [Path(get_data_path()) / "fonts" / "ttf" / f"{name}.ttf" for name in
             ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Oblique", "STIXGeneral")]  # fmt: skip
    rng, pictures = np.random.default_rng(seed), []
    for text in texts:
        font = ImageFont.truetype(str(fonts[rng.integers(len(fonts))]), int(rng.integers(20, 25)))
        picture = Image.new("L", (384, 48), int(rng.integers(200, 256)))
        ImageDraw.Draw(picture).text((6, 8), text, fill=int(rng.integers(0, 80)), font=font)
        noisy = np.asarray(picture, dtype=np.float32) + rng.normal(0, 4, (48, 384))
        pictures.append(np.broadcast_to((noisy.clip(0, 255) / 255 - 0.5) / 0.5, (3, 48, 384)))
    return np.stack(pictures).astype(np.float32)


def distance(a: str, b: str) -> int:
    """Insertions, deletions and exchanges that make one string of another."""
    row = np.arange(len(b) + 1)
    for i, letter in enumerate(a, 1):
        above, row = row, np.empty_like(row)
        row[0] = i
        for j, other in enumerate(b, 1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
    return int(row[-1])
