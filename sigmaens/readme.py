"""Keep the numbers of README.md and docs/ those of the results: `python -m sigmaens.readme` fills their blocks.

A block is what stands between `<!-- begin results/… -->` and `<!-- end -->`, and is replaced by the text of the file
that it names. Two blocks set profiles side by side: `verdicts` the verdicts of all that have any, `scores` the methods
on those whose networks are trained from scratch.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from sigmaens import paths

__all__ = ["fill", "main", "pages", "scores", "verdicts"]

BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)")
SCORES = {"accuracy": "{:.1%}", "nll": "{:.3f}", "ece": "{:.1%}", "auroc": "{:.1%}"}


def pages() -> list[Path]:
    """Return README.md and the pages of docs/."""
    return [paths.root() / "README.md", *sorted((paths.root() / "docs").glob("*.md"))]


def fill(text: str, up: str = "") -> str:
    """Return the text with every block replaced by its file.

    Args:
        text: A page, whose blocks name files relative to the project.
        up: What leads from the page's folder to the project, such as "../"; it is put before the links of a block.

    Raises:
        FileNotFoundError: if a block names a file that does not exist.
    """

    def replace(block: re.Match[str]) -> str:
        made = {"verdicts": verdicts, "scores": scores}.get(block[2])
        content = made() if made else (paths.root() / block[2]).read_text(encoding="utf-8")
        return f"{block[1]}{LINK.sub('](' + up, content.rstrip())}\n{block[3]}"

    return BLOCK.sub(replace, text)


def _metrics(stage: str) -> dict[str, Any]:
    """The metrics of a stage, by the profiles that have any, in the order of their settings."""
    files = {profile: paths.results(profile, stage) / "metrics.json" for profile in paths.load_params()["settings"]}
    return {profile: json.loads(file.read_text(encoding="utf-8")) for profile, file in files.items() if file.is_file()}


def _table(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def verdicts() -> str:
    """Return a table of the verdict of every claim on every profile, profiles in the order of their settings."""
    claims = _metrics("claims")

    def cell(claim: dict[str, object]) -> str:
        word = claim["strength"] or str(claim["verdict"]).removesuffix(" at this scale")
        return f"{word}, n = {claim['n']}" if claim["n"] else word

    lines = [["claim", *(f"[{profile}](results/{profile}/claims/14_claims.ipynb)" for profile in claims)]]
    for number in sorted({number for table in claims.values() for number in table}, key=int):
        lines.append([number, *(cell(table[number]) for table in claims.values())])
    return _table(lines)


def scores() -> str:
    """Return a table of the methods on every profile whose networks are trained from scratch, means over seeds."""
    settings = paths.load_params()["settings"]
    measured = {
        profile: methods
        for profile, methods in _metrics("comparison").items()
        if not settings[profile]["sigma"]["pretrained"]
    }

    def cell(scored: dict[str, Any] | None) -> str:
        return " / ".join(form.format(scored[name]["mean"]) for name, form in SCORES.items()) if scored else ""

    def named(profile: str) -> str:
        n = measured[profile]["single"]["accuracy"]["n"]
        return f"[{profile}](results/{profile}/comparison/05_comparison.ipynb), n = {n}"

    # The names that methods go by are those of the profiles' own tables, whose rows are in the order of the settings.
    labels: dict[str, str] = {}
    for profile in measured:
        table = (paths.results(profile, "comparison") / "readme.md").read_text(encoding="utf-8").splitlines()[2:]
        labels |= dict(zip(settings[profile]["rows"], (line.split(" | ")[0][2:] for line in table), strict=True))
    lines = [["accuracy / NLL / ECE / AUROC", *map(named, measured)]]
    lines += [[label, *(cell(methods.get(m)) for methods in measured.values())] for m, label in labels.items()]
    return _table(lines)


def main() -> int:
    """Rewrite the pages where they differ; return the exit status."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            filled = fill(text, "../" * (len(page.relative_to(paths.root()).parts) - 1))
        except FileNotFoundError as error:
            print(f"sigmaens.readme: {error}", file=sys.stderr)
            return 1
        if filled != text:
            page.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
