"""tools/site.py: every document is a page, every link leads somewhere, and no page asks another site for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import UserError
from tests.documented import DOCUMENTS, ROOT
from tools import site

pytestmark = pytest.mark.cpu


def test_every_document_is_a_page_that_is_complete_by_itself(tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, ROOT / "tools" / "site.py", "-o", tmp_path], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for name in DOCUMENTS:
        page = tmp_path / re.sub(r"(^|/)README\.md$", r"\1index.html", name).replace(".md", ".html")
        text = page.read_text(encoding="utf-8")
        assert "<h1" in text and not re.findall(r'(?:src|rel="stylesheet" href)="(?:https?:)?//[^"]*"', text)
    assert 'class="mermaid"' in (tmp_path / "documentation" / "architecture.html").read_text(encoding="utf-8")
    assert (tmp_path / "post-training" / "toy_reward.py").is_file(), "a file that a page links to"


def test_a_link_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().split("nav:")[0] + "nav: [README.md]\n")
    (tmp_path / "README.md").write_text("# Title\n\n[there](other.md) and [here](#nothing)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "add_mermaid", lambda folder: None)
    with pytest.raises(UserError, match=r"mkdocs.yml: Aborted with 2 warnings"):
        site.main(["-o", str(tmp_path / "site")])
