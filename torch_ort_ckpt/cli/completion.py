"""Shell completion: `torch-ort-ckpt completion bash` (zsh, fish) prints a script that `shtab` makes from the parser."""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")


class CommandParser(argparse.ArgumentParser):
    """A parser that knows which of its arguments are paths, for shells to complete file names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.paths: list[argparse.Action] = []

    def add_path(self, *names: str, **options: Any) -> None:
        """As `add_argument`, for the path of a file or folder."""
        self.paths.append(self.add_argument(*names, **options))


def add(subparsers: Any, root: argparse.ArgumentParser) -> None:
    summary = 'Print a completion script: eval "$(torch-ort-ckpt completion bash)" in your shell\'s start-up file.'
    parser: argparse.ArgumentParser = subparsers.add_parser("completion", help="Print a shell completion script.", description=summary)
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=lambda options: _run(options.shell, root, subparsers.choices))


def _run(shell: str, root: argparse.ArgumentParser, commands: dict[str, CommandParser]) -> int:
    import shtab  # takes 40 ms to import, which no other command needs

    for parser in commands.values():
        for action in parser.paths:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(root, shell))
    return 0
