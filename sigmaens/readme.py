"""Keep the README's numbers those of the results: `python -m sigmaens.readme` fills each block from the file it names.

A block is what stands between `<!-- begin results/… -->` and `<!-- end -->`, and is replaced by that file's text. The
block `verdicts` sets the verdicts of all profiles that have any side by side.
"""

from __future__ import annotations

import json
import re
import sys

from sigmaens import paths

__all__ = ["fill", "main", "verdicts"]

BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return the text with every block replaced by its file, whose path is relative to the project.

    Raises:
        FileNotFoundError: if a block names a file that does not exist.
    """

    def replace(block: re.Match[str]) -> str:
        named = block[2] != "verdicts"
        content = (paths.root() / block[2]).read_text(encoding="utf-8") if named else verdicts()
        return f"{block[1]}{content.rstrip()}\n{block[3]}"

    return BLOCK.sub(replace, text)


def verdicts() -> str:
    """Return a table of the verdict of every claim on every profile, profiles in the order of their settings."""
    files = {profile: paths.results(profile, "claims") / "metrics.json" for profile in paths.load_params()["settings"]}
    claims = {
        profile: json.loads(file.read_text(encoding="utf-8")) for profile, file in files.items() if file.is_file()
    }

    def cell(claim: dict[str, object]) -> str:
        word = claim["strength"] or str(claim["verdict"]).removesuffix(" at this scale")
        return f"{word}, n = {claim['n']}" if claim["n"] else word

    lines = [["claim", *(f"[{profile}](results/{profile}/claims/14_claims.ipynb)" for profile in claims)]]
    lines.append(["---"] * len(lines[0]))
    for number in sorted({number for table in claims.values() for number in table}, key=int):
        lines.append([number, *(cell(table[number]) for table in claims.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
