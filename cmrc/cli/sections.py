"""Help whose options stand in sections, for a command that has many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

ARGUMENTS, REST = "Arguments", "Other options"


class Sectioned(TyperCommand):
    """A command whose options stand in `sections`, by the names of its parameters; all others come at the end."""

    sections: ClassVar[Mapping[str, Sequence[str]]]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        place = {name: title for title, names in self.sections.items() for name in names}
        shown: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], **{title: [] for title in self.sections}, REST: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                shown[ARGUMENTS if argument else place.get(parameter.name or "", REST)].append(record)
        for title, records in shown.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
