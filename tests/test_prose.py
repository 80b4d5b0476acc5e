"""The corpus of English prose: what becomes of a page, of a plain text, and of what is not prose."""

import pytest

from sympow.experiments import prose

SENTENCE = "It was the best of times, it was the worst of times, and all of it is in a book that you can read."


def test_a_page_gives_its_paragraphs_without_menus_and_keeps_the_lines_of_listings():
    page = f"""<html><head><title>T</title><style>p {{}}</style></head><body class="index"><nav><p>Home</nav>
    <div class="toc x"><p>Index</p></div><div class="wy-grid-for-nav">
    <h1>Two&nbsp;cities<a class="headerlink">¶</a></h1><p>{SENTENCE[:50]}<b>{SENTENCE[50:60]}</b>
    {SENTENCE[60:]}<p>A &lt; B &amp; caf&eacute;<script>if (a < b) x();</script>
    <pre id=a>if a:\n    <b>b</b>()\n</pre>end"""
    joined = SENTENCE[:60] + " " + SENTENCE[60:].strip()
    assert prose.page_paragraphs(page) == ["Two cities", joined, "A < B & café", "if a:\n    b()", "end"]
    docbook = "<section><title>One</title><para>Use <command>ls</command>.</para><screen>$ ls\n$ ls</screen></section>"
    assert prose.page_paragraphs(docbook) == ["One", "Use ls.", "$ ls\n$ ls"]


def test_wrapped_lines_of_a_text_are_joined_and_code_and_lists_are_not():
    code = "  for (i = 0; i < 10; i++) total += values[i] * weights[i];\n  return;"
    info = "\x1f\nFile: a.info,  Node: Top\n\n* Menu:\n\n* One::  first.\n\x1f\nTag Table:\nx"
    text = f"Title\n=====\n\n{SENTENCE}\nand of the\nend.\n\n{code}\n\n{SENTENCE}\n- one\n{info}"
    paragraphs = ["Title", f"{SENTENCE} and of the\nend.", code, f"{SENTENCE}\n- one"]
    assert prose.text_paragraphs(text) == paragraphs
    assert prose.text_paragraphs("=head1 NAME\n\nSee L<perl> and C<< a >>.", ".pod") == ["NAME", "See perl and  a ."]
    assert prose.text_paragraphs("Foot \\Foot\\, n.\n   The {end}. [1913]", ".dict") == ["Foot , n.\n   The end. "]


@pytest.mark.parametrize("limit", [40, 100, 1000])
def test_a_text_is_cut_between_paragraphs_and_loses_nothing(limit):
    paragraphs = ["short"] * 9 + ["abcdé " * 30] + ["end"]
    texts = list(prose.cut(paragraphs, limit))
    assert all(len(text.encode()) <= limit for text in texts) and (len(texts) == 1) == (limit == 1000)
    assert "".join(texts).replace("\n", "") == "".join(paragraphs)


def test_english_prose_is_told_from_signatures_and_other_languages():
    assert prose.english_share(SENTENCE) > 0.5
    for text in ("int open(const char *path, int flags);", "Es war die beste aller Zeiten.", "1 2 3", ""):
        assert prose.english_share(text) < prose.ENGLISH
    menu = ["Home", "Next page", "Previous page"] * 3
    assert prose.drop_menus([SENTENCE, *menu, "Chapter", SENTENCE + "!", "[Up]", "x = 1\ny = 2"]) == [
        SENTENCE,
        SENTENCE + "!",
        "x = 1\ny = 2",
    ]
