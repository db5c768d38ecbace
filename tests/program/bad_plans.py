"""Plan files that are refused: what is wrong with each, and what the error says."""

from __future__ import annotations

from typing import Any

FIX = "compare it with what `Plan.save` writes"
WRITTEN = "give a file that `Plan.save` wrote"
BESIDE = "keep that file beside the plan, unchanged"
BAD_ENTRIES: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "no axis": (("do", 0), {"site": "1"}, "`axis` is missing"),
    "an entry that is a number": (("do", 0), 3, "the entry is not an object: 3"),
    "an axis that is a fraction": (("do", 0, "axis"), 1.7, "`axis` is not a whole number: 1.7"),
    "an axis that is true": (("do", 0, "axis"), True, "`axis` is not a whole number: True"),
    "an axis that is negative": (("do", 0, "axis"), -1, "`axis` is negative: -1"),
    "an axis that no value has": (("do", 0, "axis"), 64, "`axis` is too large: 64"),
    "an unknown key": (("do", 0, "colour"), "red", "`colour` is not a known key"),
    "a site without a name": (("do", 0, "site"), "", "`site` is empty: ''"),
    "a site that is a number": (("do", 0, "site"), 1, "`site` is not text: 1"),
    "units that are fractions": (
        ("do", 0, "units"),
        [1.5, 3.2],
        "[1.5, 3.2] are not positions of an axis, such as '0:3,7' or [0, 1, 2, 7]",
    ),
    "units that are booleans": (
        ("do", 0, "units"),
        [True, False],
        "[True, False] are not positions of an axis, such as '0:3,7' or [0, 1, 2, 7]",
    ),
    "units that are words": (("do", 0, "units"), "all", "'all' is not a range of positions, such as 7 or 0:3"),
    "units that run backwards": (("do", 0, "units"), "4:0", "'4:0' is not a range of positions, such as 7 or 0:3"),
    "units that are negative": (
        ("do", 0, "units"),
        [-1, 0, 1, 2],
        "[-1, 0, 1, 2] are not positions of an axis, such as '0:3,7' or [0, 1, 2, 7]",
    ),
    "no units": (("do", 0, "units"), "", "it gives [4] as constants for 0 units"),
    "units twice": (("do", 0, "units"), [1, 2, 3, 1], "units are named twice"),
    "too many units": (("do", 0, "units"), "0:200000000", "it gives [4] as constants for 200,000,000 units"),
    "constants that are text": (
        ("do", 0, "constant"),
        ["1", 2, 3, 4],
        "'1' is not a number, but an array of numbers is needed",
    ),
    "constants that are booleans": (
        ("do", 0, "constant"),
        [True, 2, 3, 4],
        "True is not a number, but an array of numbers is needed",
    ),
    "constants in lists of different length": (
        ("do", 0, "constant"),
        [[1], [2, 3]],
        "the lists of an array differ in length, or a number is too large",
    ),
    "constants too large for a float": (
        ("do", 0, "constant"),
        [10**400, 2, 3, 4],
        "the lists of an array differ in length, or a number is too large",
    ),
    "both kinds": (
        ("do", 1, "constant"),
        [1.0],
        "it needs exactly one of `constant` and `affine`",
    ),
    "a reference without a file": (
        ("do", 0, "constant"),
        {"tensor": "do[0].constant", "shape": [4]},
        "the array 'do[0].constant' is not in the file beside the plan",
    ),
    "a reference with other keys": (
        ("do", 0, "constant"),
        {"tensor": "do[0].constant"},
        "an array must have the keys `tensor` and `shape`",
    ),
    "a reference by number": (
        ("do", 0, "constant"),
        {"tensor": 3, "shape": [4]},
        "an array must have the keys `tensor` and `shape`",
    ),
    "an affine map that is a list": (("do", 1, "affine"), [1], "`affine` is not an object: [1]"),
    "an affine map without a bias": (
        ("do", 1, "affine"),
        {"parents": "8", "weight": [[1.0]]},
        "`affine.bias` is missing",
    ),
    "an affine weight of another shape": (
        ("do", 1, "affine", "weight"),
        [[1.0], [2.0]],
        "the affine weight has shape [2, 1] for units and parents [1, 2]",
    ),
}
BAD_PLANS: dict[str, tuple[tuple[str | int, ...], Any, str, str]] = {
    "another format": (("format",), "cmrc-plan-9", "is not a plan of format cmrc-plan-1", WRITTEN),
    "an unknown key": (("dos",), [], "`dos` is not a known key", FIX),
    "do's that are a number": (("do",), 5, "`do` is not a list: 5", FIX),
    "a model of other keys": (("model",), {"a": 1}, "`model.structure` is missing", FIX),
    "a model that is a list": (("model",), [1], "`model` is not an object: [1]", FIX),
    "ops counted by text": (("model", "ops"), {"linear": "2"}, "`model.ops.linear` is not a whole number: '2'", FIX),
    "ops counted as none": (("model", "ops"), {"linear": 0}, "`model.ops.linear` is too small: 0", FIX),
    "made by a list": (("made",), ["hand"], "`made` is not an object: ['hand']", FIX),
    "scores in a list": (("scores",), [1.0], "`scores` is not an object: [1.0]", FIX),
    "scores in a table": (
        ("scores", "1"),
        [[1.0]],
        "the scores of '1' cannot be read: they have shape [1, 1], but one score per unit is needed",
        WRITTEN,
    ),
    "scores of fewer units": (
        ("scores", "1"),
        [1.0, 2.0],
        "the scores of '1' cannot be read: there are only 2, but unit 7 is replaced",
        WRITTEN,
    ),
    "arrays above the folder": (
        ("tensors",),
        "../plan.0123456789ab.safetensors",
        "`tensors` is '../plan.0123456789ab.safetensors', which is not the name of an array file beside the plan",
        BESIDE,
    ),
    "arrays anywhere": (
        ("tensors",),
        "/plan.0123456789ab.safetensors",
        "`tensors` is '/plan.0123456789ab.safetensors', which is not the name of an array file beside the plan",
        BESIDE,
    ),
    "arrays without a hash": (
        ("tensors",),
        "plan.safetensors",
        "`tensors` is 'plan.safetensors', which is not the name of an array file beside the plan",
        BESIDE,
    ),
    "arrays in no text": (("tensors",), ["x"], "`tensors` is not text: ['x']", FIX),
    "arrays that are not there": (
        ("tensors",),
        "plan.0123456789ab.safetensors",
        "its array file plan.0123456789ab.safetensors cannot be read: No such file or directory",
        BESIDE,
    ),
}
BAD_TEXTS: dict[str, tuple[bytes, str]] = {
    "half an object": (
        b"{",
        "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "a list": (b"[]", "is not a plan of format cmrc-plan-1"),
    "a key twice": (
        b'{"format": "cmrc-plan-1", "do": [], "do": []}',
        "is not JSON: the key 'do' stands twice in one object",
    ),
    "NaN": (b'{"format": "cmrc-plan-1", "made": {"x": NaN}}', "is not JSON: NaN is not a number of JSON"),
    "infinity": (b'{"made": -Infinity}', "is not JSON: -Infinity is not a number of JSON"),
    "a number beyond all floats": (
        b'{"made": {"x": 1e999}}',
        "is not JSON: Out of range float values are not JSON compliant",
    ),
    "bytes that are no text": (b'{"format": "\xff"}', "is not JSON: it is not UTF-8: invalid start byte"),
    "half a character": (b'{"format": "\\ud800"}', "is not JSON: it is not UTF-8: surrogates not allowed"),
    "lists in lists": (b"[" * 100 + b"]" * 100, "is not JSON: it is nested more than 64 levels deep"),
    "very many lists in lists": (b"[" * 100_000, "is not JSON: it is nested more than 64 levels deep"),
}
