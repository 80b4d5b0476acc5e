"""Turn text into token ids and back. A tokenizer is loaded from files beside the data, without the network.

    tok = load_tokenizer("data/pystdlib")           # or a run folder, after tok.save(run_folder)
    ids = tok.encode("def f(x):")
    text = tok.decode(ids)

    decoder = tok.stream()                          # for generation: gives whole characters only
    for i in ids:
        print(decoder.feed(i), end="")
    print(decoder.flush())

There are four kinds. "bytes" has 256 byte values and an end of text (vocab_size 257). "bpe" is a tiktoken encoding
that is rebuilt from a saved vocabulary: GPT-2's, or one that was trained on the text itself (vocabulary.py).
"huggingface" is a tokenizer.json of the package tokenizers. "ids", without a vocabulary, belongs to data that came as
tokens: it writes ids in the place of text and encodes none. A tokenizer with json_escaped set belongs to text that was
escaped with json.dumps(text)[1:-1] before it was tokenized (longcrawl64): encoding escapes and decoding unescapes.
"""

import base64
import codecs
import hashlib
import json
import os
import re
import sys

import numpy as np

from . import DataError, need
from .files import read_json, write_atomically
from .huggingface import HuggingFaceEncoding, one_line

END_OF_TEXT = "<|endoftext|>"
WITHOUT_VOCABULARY = ("bytes", "ids")
VOCABULARY_FILES = {"bpe": "vocab.tiktoken", "huggingface": "vocab.json"}
FILES = ("tokenizer.json", *VOCABULARY_FILES.values())  # all that a tokenizer may save
NO_VOCABULARY = "the data came without GPT-2's vocabulary, so prepare them again where it can be downloaded"
PIECE = 1 << 16  # characters of a long text that are tokenized in one piece, on one core
LONGEST = 1 << 17  # characters of a piece where no word ends


class Tokenizer:
    """Encodes text as ids and decodes ids.

    Attributes: kind ("bytes", "bpe", "huggingface" or "ids"), vocab_size, eot (id of the end of text), start (id that a
    sample begins with, eot unless a model of transformers begins otherwise), json_escaped.
    """

    def __init__(self, kind, encoding=None, json_escaped=False):
        """Take a tiktoken.Encoding with a special token <|endoftext|> for kind "bpe", a HuggingFaceEncoding for kind
        "huggingface", IdsEncoding() for "ids", None for "bytes"."""
        self.kind = kind
        self.json_escaped = json_escaped
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = self.start = encoding.eot_token if encoding else 256

    def encode(self, text):
        """Return the list of ids of a str. No special token is added; the text of a special token is ordinary text."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        """Return an int32 array of ids for each str of a list. All kinds but "bytes" use all cores."""
        if self.json_escaped:
            texts = [json.dumps(text)[1:-1] for text in texts]
        if self.kind == "bytes":
            return [self.encode_bytes(_utf8(text)) for text in texts]
        if self.kind == "huggingface":  # tiktoken replaces lone surrogates itself, tokenizers refuses them
            texts = [_utf8(text).decode() for text in texts]
        # another tokenizer may mark a piece's start
        pieces = [[*split_long_text(text)] if self.kind == "bpe" else [text] for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        ids = iter(self.encoding.encode_ordinary_batch(flat, num_threads=os.cpu_count() or 1))
        return [np.concatenate([np.array(next(ids), np.int32) for _ in parts]) for parts in pieces]

    def encode_bytes(self, raw):
        """Return the int32 ids of any bytes, so that a file that is not UTF-8 stays as it is. Kind "bytes" only."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int32)

    def check_id(self, token):
        """Raise DataError for an id that is not in the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise DataError(f"token id {token} is not in the vocabulary of {self.vocab_size}")

    def token_bytes(self, token):
        """Return the bytes that an id of kind "bytes", "bpe" or "ids" stands for. Raises DataError as check_id does."""
        self.check_id(token)
        if token == self.eot:
            return END_OF_TEXT.encode()
        return self.encoding.decode_single_token_bytes(token) if self.encoding else bytes([token])

    def decode(self, ids):
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD, the end of text becomes its name."""
        decoder = self.stream()
        return "".join(map(decoder.feed, ids)) + decoder.flush()

    def stream(self, prompt=()):
        """Return a Decoder, which turns ids into text one by one. prompt: the ids that come first."""
        return Decoder(self, prompt)

    def _describe(self):
        """Return (what tokenizer.json says of the tokens, the vocabulary as bytes)."""
        if self.kind in WITHOUT_VOCABULARY:
            return {"kind": self.kind}, b""
        if self.kind == "huggingface":
            return {"kind": self.kind, "end_of_text": self.encoding.end_name}, self.encoding.json.encode()
        ranks = self.encoding._mergeable_ranks.items()
        description = {
            "kind": self.kind,
            "name": self.encoding.name,
            "pat_str": self.encoding._pat_str,
            "special_tokens": self.encoding._special_tokens,
        }
        return description, b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)

    def files(self):
        """Return {name: bytes} of the files that save writes. Equal tokenizers have equal files."""
        description, vocabulary = self._describe()
        description["json_escaped"] = self.json_escaped
        description["sha256"] = _checksum(description, vocabulary)
        files = {VOCABULARY_FILES[self.kind]: vocabulary} if vocabulary else {}
        return files | {"tokenizer.json": json.dumps(description, indent=2).encode()}

    def fingerprint(self):
        """Return a short hash of the files that save writes."""
        return hashlib.sha256(b"".join(self.files().values())).hexdigest()[:16]

    def same_tokens(self, tokenizer):
        """Return True if every token id means the same to both. (LongCrawl64's texts are escaped; their tokens are
        GPT-2's all the same.) Without a vocabulary, their number and the end of text are compared."""
        if "ids" in (self.kind, tokenizer.kind):
            return (self.vocab_size, self.eot) == (tokenizer.vocab_size, tokenizer.eot)
        return self._describe() == tokenizer._describe()

    def save(self, folder):
        """Write folder/tokenizer.json (and the vocabulary), from which load_tokenizer makes an equal tokenizer."""
        os.makedirs(folder, exist_ok=True)
        for name, content in self.files().items():
            write_atomically(os.path.join(folder, name), content)


def load_tokenizer(folder):
    """Return the Tokenizer saved in a dataset's or a run's folder. Raises DataError if it is missing or damaged."""
    path = os.path.join(folder, "tokenizer.json")
    try:
        saved, vocabulary = read_json(path), b""
        with one_line(path):
            kind = saved["kind"]
            if kind not in WITHOUT_VOCABULARY:
                with open(os.path.join(folder, VOCABULARY_FILES[kind]), "rb") as f:
                    vocabulary = f.read()
            if saved.pop("sha256") != _checksum(saved, vocabulary):
                raise DataError(f"{path}, or the vocabulary beside it, is damaged (sha256 differs)")
            encoding = IdsEncoding() if kind == "ids" else None
            if kind == "huggingface":
                encoding = HuggingFaceEncoding(vocabulary.decode(), saved["end_of_text"])
            elif kind == "bpe":
                encoding = need("tiktoken").Encoding(
                    saved["name"],
                    pat_str=saved["pat_str"],
                    mergeable_ranks={base64.b64decode(k): int(v) for k, v in map(bytes.split, vocabulary.splitlines())},
                    special_tokens=saved["special_tokens"],
                )
            return Tokenizer(kind, encoding, saved["json_escaped"])
    except (FileNotFoundError, DataError) as error:
        problem = f"{error.filename} is missing" if isinstance(error, FileNotFoundError) else error
        raise DataError(f"{problem}: prepare the dataset again, or copy its tokenizer files here") from error


def _checksum(description, vocabulary):
    """Return the sha256 of a vocabulary and of the values in its tokenizer.json."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode() + vocabulary).hexdigest()


class IdsEncoding:
    """Stands for GPT-2's encoding where its vocabulary cannot be had: an id is written <id>, and no text is encoded."""

    n_vocab, eot_token, warned = 50257, 50256, False

    def encode_ordinary_batch(self, texts, num_threads):
        if any(texts):
            raise DataError(f"text cannot be encoded: {NO_VOCABULARY}")
        return [[] for _ in texts]

    def decode_single_token_bytes(self, token):
        if not self.warned:
            print(f"text is shown as ids: {NO_VOCABULARY}", file=sys.stderr)
            self.warned = True
        return b"<%d>" % token


class Decoder:
    """Turns ids into text as they come.

    feed returns the text that is certain so far and holds back the beginning of a character or of an escape; flush
    returns the rest. All pieces together equal decode(ids), or what these ids add to the text of a `prompt` of ids
    that ends with a whole character.
    """

    def __init__(self, tokenizer, prompt):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.rest = ""  # the beginning of an escape
        # kind "huggingface" has ids with a text that is not certain yet, and context, some ids before them. Single
        # bytes that stand together are decoded together, so neither begins with a part of them.
        self.byte_ids = getattr(tokenizer.encoding, "byte_ids", ())
        self.ids = []
        self.context = [token for token in prompt if token not in self.byte_ids][-1:] or [*prompt]

    def feed(self, token):
        """Return the text that one more id makes certain, perhaps an empty str."""
        token = int(token)
        if self.tokenizer.kind != "huggingface":
            return self._unescape(self.utf8.decode(self.tokenizer.token_bytes(token)))
        self.tokenizer.check_id(token)
        self.ids.append(token)
        if token in self.byte_ids:  # one wrong byte makes U+FFFD of all those beside it
            return ""
        text = self._new_text()
        if text.endswith("\ufffd"):  # perhaps the beginning of a character
            return ""
        self.ids, self.context = [], self.ids
        return self._unescape(text)

    def flush(self):
        """Return the rest: U+FFFD for an unfinished character, an unfinished escape as it is."""
        return self._unescape(self._new_text() if self.ids else self.utf8.decode(b"", True)) + self.rest

    def _new_text(self):
        """Return the text of the ids to be shown, as it stands after those before them.

        A tokenizer may write an id differently at the start of a text, so the ids before are decoded with it.
        """
        decode = self.tokenizer.encoding.decode
        return decode(self.context + self.ids)[len(decode(self.context)) :]

    def _unescape(self, text):
        if not self.tokenizer.json_escaped:
            return text
        text, self.rest = _unescape(self.rest + text)
        return text


_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a surrogate pair
_ESCAPE = re.compile(
    rf"(?P<cut>(?:{_HIGH})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?\Z)"  # an escape that the end of the text cuts
    rf'|{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{{4}}|\\["\\/bfnrt]'
)


def _unescape(text):
    """Replace the escapes of a JSON string; return (text, the unfinished escape at the end).

    Invalid escapes and halves of surrogate pairs are left as they are, because generated text need not be valid JSON.
    """
    cut = ""

    def replace(match):
        nonlocal cut
        cut = match["cut"] or cut
        return "" if match["cut"] is not None else json.loads(f'"{match[0]}"')

    return _ESCAPE.sub(replace, text), cut


_CUT = re.compile(r"[^\W_](?=\W)")


def split_long_text(text):
    """Yield a long text in pieces of about PIECE characters that together give the ids of the whole.

    Cuts come between a letter or digit and a character that is neither: none of GPT-2's words spans these two. A word
    of LONGEST characters, which is no text, is cut too: its time grows faster than its length.
    """
    start = 0
    while len(text) - start > 2 * PIECE:
        cut = _CUT.search(text, start + PIECE, start + LONGEST)
        end = cut.end() if cut else start + LONGEST
        yield text[start:end]
        start = end
    yield text[start:]


def _utf8(text):
    """Return text as UTF-8. A lone surrogate (half an emoji, or a stray byte of a command line) becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
