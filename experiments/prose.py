"""Write the English prose of Debian's documentation packages as text files, one folder a package.

    python -m experiments.prose        # the packages of prose.txt on Debian 12, into prose/; nothing is installed
    python data/source/prepare.py --root prose --suffix=.txt --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/prose

Each package is downloaded with `apt-get download`. Its files are split into paragraphs, pages (HTML, Mallard, DocBook)
at tags, and plain texts at empty lines. A paragraph is prose if it has at least WORDS words, and a share of ENGLISH of
them is in COMMON: this leaves out menus, tables, listings and other languages. Of equal paragraphs in a package the
first one is written, as one line. Of pages and plain texts in one package, which often say the same, those with more
letters are taken.
"""

import glob
import gzip
import html
import multiprocessing
import os
import re
import subprocess
import tempfile
from pathlib import Path

LETTERS = 15_000  # in a file, of at most four bytes each: data/source/prepare.py takes up to 65,536 bytes
WORDS = 8
ENGLISH = 0.22  # novels have 0.4, manuals 0.3
COMMON = set(
    "the of and to a in is that it for as with be are on this by or not if you can from an at which was have".split()
)
HIDDEN = re.compile(r"<!--.*?-->|<(head|script|style|pre|programlisting|screen)\b.*?</\1>", re.DOTALL)
INLINE = re.compile(r"</?(a|abbr|b|cite|code|command|em|emphasis|i|kbd|link|literal|q|small|span|strong|tt)\b[^>]*>")
BORDER = {True: re.compile(r"<[a-zA-Z/!?][^>]*>"), False: re.compile(r"\n\s*\n")}  # {of a page: between paragraphs}


def paragraphs(text):
    """Return (True for a page, its paragraphs of English prose, each as one line) for the text of a file."""
    is_page = text.lstrip().startswith("<")
    if is_page:
        text = INLINE.sub("", HIDDEN.sub("<p>", text))
    parts = [" ".join(html.unescape(part).split()) for part in BORDER[is_page].split(text)]
    return is_page, [part for part in parts if is_prose(part)]


def is_prose(paragraph):
    """Return True for at least WORDS words, among them the share ENGLISH of the most common ones."""
    words = re.findall(r"\w+", paragraph.lower())
    return len(words) >= WORDS and sum(word in COMMON for word in words) >= ENGLISH * len(words)


def write_package(package):
    """Download a package and write its prose to prose/PACKAGE; return a line that says how many letters it has.

    A package that apt-get does not have gives no file.
    """
    prose = {True: {}, False: {}}  # {of pages: {paragraph: None}}, in order
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(["apt-get", "-q", "download", package], cwd=downloads, capture_output=True)
        for archive in glob.glob(f"{downloads}/*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, f"{downloads}/files"], check=True)
        for path in sorted(glob.glob(f"{downloads}/files/**", recursive=True)):
            if os.path.isfile(path) and not os.path.islink(path):
                open_text = gzip.open if path.endswith((".gz", ".dz")) else open
                with open_text(path, "rt", encoding="utf-8", errors="replace") as f:
                    is_page, texts = paragraphs(f.read())
                prose[is_page] |= dict.fromkeys(texts)
    text = max(map("\n".join, prose.values()), key=len)
    for i in range(0, len(text), LETTERS):
        os.makedirs(f"prose/{package}", exist_ok=True)
        Path(f"prose/{package}/{i // LETTERS:05}.txt").write_text(text[i : i + LETTERS], encoding="utf-8")
    return f"{package}: {len(text):,} letters"


def main():
    """Write all packages, as many at a time as there are processors."""
    packages = Path(__file__).with_name("prose.txt").read_text().split()
    with multiprocessing.Pool() as pool:
        for line in pool.imap_unordered(write_package, packages):
            print(line, flush=True)


if __name__ == "__main__":
    main()
