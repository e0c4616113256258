"""The words of the commands that compare with PEFT."""

from __future__ import annotations

import argparse
import importlib.util
import sys


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the words that every such command takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", action="append", help="only this family; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the words of this command; ends it where PEFT is not installed."""
    options = parser.parse_args()
    if importlib.util.find_spec("peft") is None:
        sys.exit("peft is not installed: pip install peft, in its own environment")
    return options
