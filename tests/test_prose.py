"""The corpus of English prose: what becomes of a page, of a plain text, and of what is not prose."""

import os
import subprocess

import pytest

from sympow.experiments import prose

SENTENCE = "It was the best of times, it was the worst of times, and all of it is in a book that you can read."


def test_a_page_gives_its_paragraphs_without_menus_and_listings():
    page = f"""<html><head><title>{SENTENCE}</title></head><body><nav><p>Home of the page</nav><!-- {SENTENCE} -->
    <h1>Two&nbsp;cities</h1><p>{SENTENCE[:50]}<b>{SENTENCE[50:60]}</b>
    {SENTENCE[60:]}<p>A &lt; B &amp; caf&eacute; {SENTENCE}<script>if (a < b) x();</script><pre>{SENTENCE}</pre>end"""
    is_page, paragraphs = prose.paragraphs(page)
    assert is_page and paragraphs == [SENTENCE[:60] + " " + SENTENCE[60:].strip(), f"A < B & café {SENTENCE}"]


def test_a_plain_text_gives_each_paragraph_as_one_line():
    code = "  for (i = 0; i < 10; i++) total += values[i] * weights[i];\n  return;"
    text = f"Title\n=====\n\n{SENTENCE}\nand of the\nend.\n\n{code}\n\n{SENTENCE}"
    assert prose.paragraphs(text) == (False, [f"{SENTENCE} and of the end.", SENTENCE])


@pytest.mark.parametrize(
    "text", ["int open(const char *path, int flags);", "Es war die beste aller Zeiten in dem Land.", "1 2 3", ""]
)
def test_english_prose_is_told_from_signatures_and_other_languages(text):
    assert prose.is_prose(SENTENCE) and not prose.is_prose(text)


def test_a_package_gives_each_paragraph_once_in_files_that_the_prepare_script_takes(tmp_path, monkeypatch):
    """Of pages and plain texts those with more letters, here the pages."""
    pages = "".join(f"<p>Page {i}: {SENTENCE}" for i in range(400))

    def run(command, **options):
        if command[0] == "apt-get":
            open(f"{options['cwd']}/a.deb", "w").close()
        else:
            os.makedirs(command[3])
            for name, text in (("a.html", pages), ("b.html", f"<p>{pages}<p>{SENTENCE}"), ("README", SENTENCE)):
                with open(f"{command[3]}/{name}", "w") as f:
                    f.write(text)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    assert prose.write_package("a-doc").startswith("a-doc: ")
    texts = [path.read_text() for path in sorted((tmp_path / "prose/a-doc").iterdir())]
    assert len(texts) > 1 and max(map(len, texts)) == prose.LETTERS
    assert "".join(texts).split("\n") == [f"Page {i}: {SENTENCE}" for i in range(400)] + [SENTENCE]
