"""Keep the README's numbers those of the results: `python -m sigmaens.readme` fills each block from the file it names.

A block is what stands between `<!-- begin results/… -->` and `<!-- end -->`, and is replaced by that file's text.
"""

from __future__ import annotations

import re
import sys

from sigmaens import paths

__all__ = ["fill", "main"]

BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return the text with every block replaced by its file, whose path is relative to the project.

    Raises:
        FileNotFoundError: if a block names a file that does not exist.
    """

    def replace(block: re.Match[str]) -> str:
        content = (paths.root() / block[2]).read_text(encoding="utf-8")
        return f"{block[1]}{content.rstrip()}\n{block[3]}"

    return BLOCK.sub(replace, text)


def main() -> int:
    """Rewrite README.md where it differs; return the exit status."""
    readme = paths.root() / "README.md"
    text = readme.read_text(encoding="utf-8")
    try:
        filled = fill(text)
    except FileNotFoundError as error:
        print(f"sigmaens.readme: {error}", file=sys.stderr)
        return 1
    if filled != text:
        readme.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
