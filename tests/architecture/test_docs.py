"""Links in the documentation lead somewhere, and the page of recipe keys is the one the code would write today."""

from __future__ import annotations

import re

from tests.architecture.source import REPO


def test_every_relative_link_leads_to_a_file() -> None:
    broken = []
    for page in [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *(REPO / "benchmarks").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.partition("#")[0]).exists():
                broken.append(f"{page.relative_to(REPO)}: {target}")
    assert not broken, "\n".join(broken)


def test_the_page_of_recipe_keys_is_up_to_date() -> None:
    from m2flow.scaffold import reference

    page = REPO / "docs" / "recipe-keys.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `make docs`"
