"""Write the English prose of Debian's documentation packages as text files, one folder a package.

    python -m experiments.prose --out=prose        # as root on Debian 12, in a few minutes, without installing anything
    python data/source/prepare.py --root prose --suffix=.txt --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/prose

Packages come from `apt-get download`. Of each package either its pages (HTML, DocBook, Mallard) or its plain texts
(text, reStructuredText, Markdown, Info, dictionaries) are taken, whichever are more. A paragraph is one line, and a
listing keeps its lines. Four simple rules leave out what is not prose:

- files whose names say that they are an index, a log of changes or a licence, and the sources of pages;
- paragraphs that stand in more than REPEATED files of a package, which are headers, footers and menus;
- more than MENU paragraphs of fewer than five words behind one another, which are menus and tables;
- files in which fewer than ENGLISH of the words are among the 30 most common English ones, or that are shorter than
  SHORTEST: tables, generated signatures, other languages.

Files above LARGEST bytes are cut between paragraphs.
"""

import argparse
import bz2
import glob
import gzip
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from html.parser import HTMLParser
from itertools import groupby

PACKAGES = """
    anarchism apache2-doc debian-handbook dict-gcide gnome-user-docs libreoffice-help-en-us linux-doc-6.1
    postgresql-doc-15 python3.11-doc emacs-common fortunes
""".split()
LARGEST = 60_000  # bytes of a file
SHORTEST = 500  # letters of a file
ENGLISH = 0.22  # share of the common words in a text; novels have 0.4
REPEATED = 8  # files of a package
MENU = 6  # short paragraphs behind one another
COMMON = set(
    "the of and to a in is that it for as with be are on this by or not if you can from an at which was have i he his"
    .split()
)
PAGE = re.compile(r"\.(x?html?|xml|page)$")
TEXT = re.compile(r"(\.(txt|rst|md|dict|pod|text|info(-\d+)?)|/[^./]+)$")
UNWANTED = re.compile(
    r"change|copyright|licen[sc]e|copying|legal|index-|genindex|modindex|search|_sources|translations/|_modules|/NEWS|authors|thanks|"
    r"contributors|credits|glossary|release|whatsnew|lintian|doc-base|/bin/|/lib/|/bug/|"
    r"/(help|html)/(?!en)[a-z]{2}([-_]\w+)?/",
    re.IGNORECASE,
)
NAVIGATION = re.compile(r"(Next|Prev(ious)?|Up|Home|Contents)\b.{,80}(:|Next|Up|Home|Prev)|\[.{,60}\]$|\W*$")
MARKUP = {
    ".dict": (r"\\[^\\\n]*\\|\[[^\]\n]*\]|[{}]", ""),  # pronunciations, sources, links
    ".pod": (r"^=\w+ ?|\b[A-Z]<+([^<>]*)>+", r"\1"),
}
UNPACK = {None: bytes, ".gz": gzip.decompress, ".dz": gzip.decompress, ".bz2": bz2.decompress}
HIDDEN = {"head", "script", "style", "nav", "header", "footer", "aside", "form", "button", "select", "svg", "math"}
MENUS = re.compile(
    r"(?<![\w-])(nav\w*|\w*sidebar|\w*toc|toctree-wrapper|contents|breadcrumbs?|footer|related|headerlink|menu|linenos|"
    r"index|copyright|legalnotice)(?![\w-])"
)
WHOLE = {"html", "body", "main", "article", "br", "hr", "img", "input", "link", "meta", "pre"}  # hide nothing by class
BLOCKS = set(
    "p div br hr h1 h2 h3 h4 h5 h6 li ul ol dl dt dd td th tr table caption blockquote section title para simpara item "
    "listitem term entry desc note row center address figcaption subtitle".split()
)
LISTINGS = {"pre", "programlisting", "screen", "literallayout", "code-block"}


class Page(HTMLParser):
    """Collects the paragraphs of a page (HTML, DocBook or Mallard). One of a listing has line ends, all others none."""

    def __init__(self):
        super().__init__()
        self.parts, self.paragraphs = [], []
        self.hidden, self.depth = "", 0  # the tag that hides what is in it, and how many of its name are open
        self.listing = ""  # the tag of the listing that is open

    def handle_starttag(self, tag, attributes):
        words = " ".join(value or "" for key, value in attributes if key in ("class", "role"))
        if self.hidden:
            self.depth += tag == self.hidden
        elif tag in HIDDEN or (tag not in WHOLE and MENUS.search(words)):
            self.hidden, self.depth = tag, 1
        elif tag == "br" and self.listing:
            self.parts.append("\n")
        elif tag in BLOCKS or tag in LISTINGS:
            self.end_paragraph()
            self.listing = self.listing or (tag if tag in LISTINGS else "")

    def handle_startendtag(self, tag, attributes):
        if not self.hidden and tag in BLOCKS:
            self.handle_starttag(tag, [])

    def handle_endtag(self, tag):
        if self.hidden:
            self.depth -= tag == self.hidden
            self.hidden = self.hidden if self.depth else ""
        elif tag in BLOCKS or tag in LISTINGS:
            self.end_paragraph()
            self.listing = "" if tag == self.listing else self.listing

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)

    def end_paragraph(self):
        text = "".join(self.parts).replace("\xa0", " ").replace("\xad", "").replace("¶", "")
        text = re.sub(r"[ \t\r]+$", "", text, flags=re.MULTILINE).strip("\n") if self.listing else " ".join(text.split())
        self.parts = []
        if text:
            self.paragraphs.append(text)


def page_paragraphs(text):
    """Return the paragraphs of a page as a list of texts."""
    page = Page()
    page.feed(text)
    page.close()
    page.end_paragraph()
    return page.paragraphs


def text_paragraphs(text):
    """Return the paragraphs of a plain text as a list of texts. Lines that were wrapped are joined, in prose only."""
    text = re.sub(r"\x1f\nTag Table:.*", "", text, flags=re.DOTALL)  # of Info, whose menus and titles go too
    text = re.sub(r"^(\x1f|File: .*Node: .*|\* .*::.*|\* Menu:|[^\w\s]{3,})$", "", text, flags=re.MULTILINE)
    paragraphs = []
    for block in re.split(r"\n[\s%]*\n", text.expandtabs()):
        block = block.strip("\n")
        if english_share(block) > ENGLISH / 2 and not re.search(r"\S {3,}\S|[;{}]$", block, re.MULTILINE):
            block = re.sub(r"(?<=.{45})\n\s*(?![-*•] |\d+[.)] |--)", " ", block)
        paragraphs += [block] if block.strip() else []
    return paragraphs


def english_share(text):
    """Return the share of a text's words that are among the most common ones of English, 0 if it has none."""
    words = re.findall(r"\w+", text.lower())
    return sum(word in COMMON for word in words) / max(1, len(words))


def drop_menus(paragraphs):
    """Return the paragraphs without more than MENU short ones behind one another."""
    kept = []
    paragraphs = [text for text in paragraphs if not NAVIGATION.match(text)]
    for short, group in groupby(paragraphs, lambda text: "\n" not in text and text.count(" ") < 4):
        group = list(group)
        kept += [] if short and len(group) > MENU else group
    return kept


def cut(paragraphs, limit=LARGEST):
    """Yield texts of at most `limit` bytes. A paragraph of more letters than a quarter of that is cut too."""
    text = ""
    for paragraph in paragraphs:
        step = limit // 4 - 1  # letters, of at most four bytes
        for begin in range(0, len(paragraph), step):
            piece = paragraph[begin : begin + step] + "\n"
            if len((text + piece).encode()) > limit:
                yield text
                text = ""
            text += piece
    yield text


def read_package(path):
    """Return {name: paragraphs} of the pages or of the plain texts of a .deb file, whichever are more."""
    kinds = {page_paragraphs: {}, text_paragraphs: {}}
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        for member in (archive := tarfile.open(fileobj=process.stdout, mode="r|")):
            name, packing = re.fullmatch(r"(.*?)(\.gz|\.dz|\.bz2)?", member.name).groups()
            kind = page_paragraphs if PAGE.search(name) else text_paragraphs if TEXT.search(name) else None
            if kind and member.isfile() and not UNWANTED.search(name):
                text = decode(UNPACK[packing](archive.extractfile(member).read()))
                markup, plain = MARKUP.get(os.path.splitext(name)[1], ("$^", ""))
                kinds[kind][name] = kind(re.sub(markup, plain, text, flags=re.MULTILINE))
    pages, texts = (sum(map(len, sum(files.values(), []))) for files in kinds.values())
    return kinds[page_paragraphs if pages > texts / 2 else text_paragraphs]


def decode(data):
    """Return the text of bytes in UTF-8 or Latin 1, empty if they are no text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return "" if "\0" in text else text.replace("\r\n", "\n")


def write_package(path, folder):
    """Write the English texts of a .deb file into a folder, and return how many bytes they have."""
    files = read_package(path)
    counts = Counter(text for texts in files.values() for text in set(texts))
    total = 0
    for i, (name, texts) in enumerate(sorted(files.items())):
        texts = drop_menus([text for text in texts if counts[text] <= REPEATED])
        whole = "\n".join(texts)
        if len(whole) < SHORTEST or english_share(whole) < ENGLISH:
            continue
        os.makedirs(folder, exist_ok=True)
        stem = os.path.splitext(os.path.basename(name))[0][:80]
        for j, text in enumerate(cut(texts)):
            total += len(text.encode())
            with open(os.path.join(folder, f"{i:05}-{stem}-{j}.txt"), "w", encoding="utf-8") as f:
                f.write(text)
    return total


def extract(job):
    """Download one package and write its texts; return a line that says how much there is. job: (package, folder)."""
    package, out = job
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "-q", "download", package], cwd=folder, capture_output=True)
        paths = glob.glob(f"{folder}/*.deb")
        size = sum(write_package(path, os.path.join(out, package)) for path in paths)
    return f"{package}: {size:,} bytes" if paths else f"{package}: apt-get has no such package"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the texts are written")
    parser.add_argument("--package", nargs="+", default=PACKAGES, help="other packages than those of the list")
    args = parser.parse_args()
    with multiprocessing.Pool() as pool:
        for line in pool.imap_unordered(extract, [(package, args.out) for package in args.package]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
