"""Drawn mutants that no test notices because nothing is wrong with them: each with the reason."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {}
