"""Write the English prose of Debian's documentation packages as text files, one folder a package.

    python -m experiments.prose --out=prose           # the packages of prose.txt, on Debian 12; nothing is installed
    python data/source/prepare.py --root prose --suffix=.txt --tokenizer=bpe:8192 --val_fraction=0.05 --out=data/prose

Each package is downloaded with `apt-get download`. Either its pages (HTML, Mallard, DocBook) or its plain texts (text,
reStructuredText, Markdown, Info, POD, dictionaries) are taken, and pages where both are much. A paragraph is one line,
and a listing keeps its lines. Rules for what is no prose:

- A file is left out if its name says index, log of changes, licence, release or source of a page.
- A paragraph is left out if it stands in more than REPEATED files of the package: headers, footers, menus.
- More than MENU paragraphs of fewer than five words behind one another are left out: menus and tables.
- A file is left out if fewer than ENGLISH of its words are in COMMON, or if it has fewer than SHORTEST letters: tables,
  signatures, other languages.

Files above LARGEST bytes are cut between paragraphs.
"""

import argparse
import bz2
import glob
import gzip
import html
import multiprocessing
import os
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from itertools import groupby

PACKAGES = os.path.join(os.path.dirname(__file__), "prose.txt")  # names of packages
LARGEST = 60_000
SHORTEST = 500
ENGLISH = 0.22  # novels have 0.4, manuals 0.3
REPEATED = 8
MENU = 6
COMMON = set(
    "the of and to a in is that it for as with be are on this by or not if you can from an at which was have i".split()
)
PAGE = re.compile(r"\.(x?html?|xml|page)$")
TEXT = re.compile(r"(\.(txt|rst|md|dict|pod|text|info(-\d+)?)|/[^./]+)$")
UNWANTED = (
    r"change|copyright|licen[sc]e|copying|legal|index-|genindex|modindex|search|_sources|_modules|/NEWS|authors|thanks",
    r"contributors|credits|glossary|release|whatsnew|lintian|doc-base|/bin/|/lib/|/bug/|delta\.pod|translations/",
    r"/(help|html)/(?!en)[a-z]{2}([-_]\w+)?/|\.(?!en\b)[a-z]{2}\.html",
)
UNWANTED = re.compile("|".join(UNWANTED), re.IGNORECASE)
UNPACK = {None: bytes, ".gz": gzip.decompress, ".dz": gzip.decompress, ".bz2": bz2.decompress}
MENUS = (
    r"nav\w*|\w*sidebar|\w*toc|toctree-wrapper|contents|header|footer|related|menu|breadcrumbs?|linenos|index|copyright",
    "legalnotice",
)
HIDDEN = (
    r"<!--.*?-->|<(head|script|style|nav|footer|aside|form|button|select|svg|math)\b.*?</\1>|<a [^>]*headerlink.*?</a>",
    rf'<(div|p|ul|table|td)\b[^>]*class="({"|".join(MENUS)})[ "].*?</\2>',
)
HIDDEN = re.compile("|".join(HIDDEN), re.DOTALL)
LISTING = re.compile(r"<(pre|programlisting|screen|literallayout)\b(.*?</)\1>", re.DOTALL)
BLOCK = (
    "p|div|br|hr|h[1-6]|li|[uod]l|d[td]|t[dhr]|table|caption|blockquote|section|(sub)?title|(sim)?para|item|entry",
    "listitem|term|desc|note|row|center|address|figcaption|body",
)
BLOCK = re.compile(rf"</?({'|'.join(BLOCK)})\b[^>]*>")
TAG = re.compile(r"<[a-zA-Z/!?][^>]*>")
MARKUP = {
    ".dict": (r"\\[^\\\n]*\\|\[[^\]\n]*\]|[{}]", ""),  # pronunciations, sources and links
    ".pod": (r"^=\w+ ?|\b[A-Z]<+([^<>]*)>+", r"\1"),
    "": (r"^(\x1f|File: .*Node: .*|\* .*::.*|\* Menu:|[^\w\s]{3,})$", ""),  # Info's titles and menus, underlining
}


def page_paragraphs(text):
    """Return the paragraphs of a page as a list of texts. A paragraph has line ends only if it is a listing."""
    paragraphs = []
    for i, part in enumerate(LISTING.split(HIDDEN.sub("", text))):
        if i % 3 == 0:
            lines = TAG.sub("", BLOCK.sub("\0", part)).split("\0")
            paragraphs += [" ".join(html.unescape(line).split()) for line in lines]
        elif i % 3 == 2:  # a listing from the end of its tag's name on
            paragraphs.append(html.unescape(TAG.sub("", "<pre" + part[:-2])).strip("\n"))
    return [text for text in paragraphs if text]


def text_paragraphs(text, suffix=""):
    """Return the paragraphs of a plain text as a list of texts. Wrapped lines are joined where they are prose.

    suffix: of the file's name, for example .pod. Its markup is removed.
    """
    for markup, plain in (MARKUP.get(suffix, MARKUP[""]), MARKUP[""]):
        text = re.sub(markup, plain, text, flags=re.MULTILINE)
    paragraphs = []
    for block in re.split(r"\n[\s%]*\n", text.partition("\nTag Table:")[0].expandtabs()):
        if english_share(block) > ENGLISH / 2 and not re.search(r"\S {3,}\S|[;{}]$", block, re.MULTILINE):
            block = re.sub(r"(?<=.{45})\n\s*(?![-*•] |\d+[.)] |--)", " ", block)
        paragraphs.append(block.strip("\n"))
    return [text for text in paragraphs if text]


def english_share(text):
    """Return the share of a text's words that are among the most common ones of English, 0 if it has none."""
    words = re.findall(r"\w+", text.lower())
    return sum(word in COMMON for word in words) / max(1, len(words))


def drop_menus(paragraphs):
    """Return the paragraphs without more than MENU short ones behind one another, and without lines of navigation."""
    prose = [text for text in paragraphs if not re.match(r"(Next|Prev|Previous|Up): |\[.{,60}\]$|\W*$", text)]
    runs = [(short, list(run)) for short, run in groupby(prose, lambda text: len(text.split(None, 4)) < 5)]
    return [text for short, run in runs if not short or len(run) <= MENU for text in run]


def cut(paragraphs, limit=LARGEST):
    """Yield texts of at most `limit` bytes. A paragraph of more letters than a quarter of that is cut too."""
    step = limit // 4 - 1  # letters, of at most four bytes
    pieces = [text[begin : begin + step] + "\n" for text in paragraphs for begin in range(0, len(text), step)]
    begin = size = 0
    for i, piece in enumerate(pieces):
        size += len(piece.encode())
        if size > limit:
            yield "".join(pieces[begin:i])
            begin, size = i, len(piece.encode())
    yield "".join(pieces[begin:])


def read_package(path):
    """Return {name: paragraphs} of the pages of a .deb file, or of its texts if they have twice as many letters."""
    pages, texts = {}, {}
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        for member in (archive := tarfile.open(fileobj=process.stdout, mode="r|")):
            name, packing = re.fullmatch(r"(.*?)(\.gz|\.dz|\.bz2)?", member.name).groups()
            is_page = PAGE.search(name)
            if not member.isfile() or UNWANTED.search(name) or not (is_page or TEXT.search(name)):
                continue
            text = UNPACK[packing](archive.extractfile(member).read()).decode("utf-8", "replace").replace("\r\n", "\n")
            if "\0" in text or "\ufffd" in text[:4096]:  # it is not in UTF-8, or no text
                continue
            if is_page:
                pages[name] = page_paragraphs(text)
            else:
                texts[name] = text_paragraphs(text, os.path.splitext(name)[1])
    letters = [sum(len(text) for texts in files.values() for text in texts) for files in (pages, texts)]
    return pages if letters[0] > letters[1] / 2 else texts


def write_package(job):
    """Download a package and write its English files to a folder; return a line that says how many bytes they have.

    job: (package, folder). A package that apt-get does not have gives 0 bytes.
    """
    package, folder = job
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(["apt-get", "-q", "download", package], cwd=downloads, capture_output=True)
        files = {name: texts for path in glob.glob(f"{downloads}/*.deb") for name, texts in read_package(path).items()}
    counts = Counter(text for texts in files.values() for text in set(texts))
    size = 0
    for i, name in enumerate(sorted(files)):
        texts = drop_menus([text for text in files[name] if counts[text] <= REPEATED])
        prose = "\n".join(texts)
        if len(prose) >= SHORTEST and english_share(prose) >= ENGLISH:
            os.makedirs(folder, exist_ok=True)
            stem = os.path.splitext(os.path.basename(name))[0][:80]
            for j, text in enumerate(cut(texts)):
                with open(os.path.join(folder, f"{i:05}-{stem}-{j:03}.txt"), "w", encoding="utf-8") as f:
                    f.write(text)
            size += len(prose.encode())
    return f"{package}: {size:,} bytes"


def main():
    """Write the packages that the command line names, as many at a time as there are processors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the texts are written")
    parser.add_argument("--package", nargs="+", help="instead of those of prose.txt")
    args = parser.parse_args()
    with open(PACKAGES) as f:
        packages = args.package or f.read().split()
    with multiprocessing.Pool() as pool:
        jobs = [(package, os.path.join(args.out, package)) for package in packages]
        for line in pool.imap_unordered(write_package, jobs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
