"""From run folders to one HTML file (drawing/document.py).

    folder --run_folder--> Run --sections--> Html --write_report--> report.html

Laws (tests/report/test_page.py)
    1. No untrusted text becomes markup; the page parses, with every element closed.
    2. What a run folder lacks is left out, whatever it is.
    3. 100,000 steps make less than a megabyte.
    4. The file appears complete or not at all, and replaces only a file that is our report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.files import require_replaceable, write_file
from megatrain.report.config_diff import config_section
from megatrain.report.curves import curves
from megatrain.report.drawing.document import document, signs
from megatrain.report.drawing.markup import Html
from megatrain.report.memory_bars import memory_section
from megatrain.report.run import Run, read_run
from megatrain.report.summary import summary_section
from megatrain.report.tables import facts_table, flattened
from megatrain.report.texts import samples_section
from megatrain.report.time_split import split_section
from megatrain.report.timeline import timeline_section

_NAME = "MegaTrain report"


def write_report(folders: Sequence[Path], target: Path) -> None:
    """Write the report of one run, or of several side by side.

    Raises ConfigError if a folder holds no run, or a file that is not our report is in the way;
    DiskError if the system fails to read or write.
    """
    if not folders:
        raise ConfigError("a report needs at least one run folder")
    require_replaceable(target, signs(_NAME))
    runs = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    write_file(target, render(runs).encode(), durable=False)


def render(runs: Sequence[Run]) -> Html:
    """Return the page."""
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    sections = {name: section(runs) for name, section in _SECTIONS.items()}
    return document(title, _NAME, sections)


def _settings(runs: Sequence[Run]) -> Html:
    return facts_table(runs, [flattened(run.settings) for run in runs], "Settings of the plan")


def _data(runs: Sequence[Run]) -> Html:
    return facts_table(runs, [flattened(run.data_card) for run in runs], "Data card")


def _machine(runs: Sequence[Run]) -> Html:
    return facts_table(runs, [flattened(run.machine) for run in runs], "Machine")


_SECTIONS: dict[str, Callable[[Sequence[Run]], Html]] = {
    "Summary": summary_section,
    "Curves": curves,
    "Time of a step": split_section,
    "One step by lane": timeline_section,
    "Memory": memory_section,
    "Plan": _settings,
    "Data": _data,
    "Samples": samples_section,
    "Config": config_section,
    "Machine": _machine,
}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that no other has."""
    parts = [folder.absolute().parts for folder in folders]
    names = []
    for number, own in enumerate(parts):
        others = [other for at, other in enumerate(parts) if at != number]
        length = 1
        while length < len(own) and any(other[-length:] == own[-length:] for other in others):
            length += 1
        twice = parts[:number].count(own)
        names.append("/".join(own[-length:]) + (f" ({twice + 1})" if twice else ""))
    return names
