"""Turn text into token ids and back. A tokenizer is loaded from files beside the data, without the network.

    tok = load_tokenizer("data/pystdlib")           # or a run folder, after tok.save(run_folder)
    ids = tok.encode("def f(x):")
    text = tok.decode(ids)

    decoder = tok.stream()                          # for generation: gives whole characters only
    for i in ids:
        print(decoder.feed(i), end="")
    print(decoder.flush())

There are two kinds. "bytes" has 256 byte values and an end of text (vocab_size 257). "bpe" is a tiktoken encoding that
is rebuilt from a saved vocabulary. A tokenizer with json_escaped set belongs to text that was escaped with
json.dumps(text)[1:-1] before it was tokenized (longcrawl64): encoding escapes and decoding unescapes.
"""

import base64
import codecs
import json
import os
import re

import numpy as np

from . import DataError, need
from .files import write_atomically

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILE = "vocab.tiktoken"
PIECE = 1 << 16  # characters of a long text that are tokenized in one piece, on one core
AT_ONCE = 1 << 22  # characters tokenized before their ids become arrays; as Python integers these take 40 bytes each


class Tokenizer:
    """Encodes text as ids and decodes ids.

    Attributes: kind ("bytes" or "bpe"), vocab_size, eot (id of the end of text), json_escaped.
    """

    def __init__(self, kind, encoding=None, json_escaped=False):
        """Take a tiktoken.Encoding with a special token <|endoftext|> for kind "bpe", None for "bytes"."""
        if (kind, encoding is None) not in (("bytes", True), ("bpe", False)):
            raise DataError(f"tokenizer kind must be bytes, or bpe with an encoding, got {kind!r}")
        self.kind = kind
        self.json_escaped = json_escaped
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = encoding._special_tokens[END_OF_TEXT] if encoding else 256

    def encode(self, text):
        """Return the list of ids of a str. No special token is added; the text of a special token is ordinary text."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts):
        """Return an int32 array of ids for each str of a list. Kind "bpe" uses all cores, also on one long text."""
        if self.json_escaped:
            texts = [json.dumps(text)[1:-1] for text in texts]
        if self.kind == "bytes":
            return [self.encode_bytes(_utf8(text)) for text in texts]
        ids, todo, size = [[np.zeros(0, np.int32)] for _ in texts], [], 0

        def encode():
            pieces = self.encoding.encode_ordinary_batch([piece for _, piece in todo], num_threads=os.cpu_count() or 1)
            for (number, _), piece in zip(todo, pieces):
                ids[number].append(np.array(piece, dtype=np.int32))
            todo.clear()

        for number, text in enumerate(texts):
            for piece in split_long_text(text):
                todo.append((number, piece))
                size += len(piece)
                if size >= AT_ONCE:
                    encode()
                    size = 0
        encode()
        return [np.concatenate(parts) for parts in ids]

    def encode_bytes(self, raw):
        """Return the int32 ids of any bytes, so that a file that is not UTF-8 stays as it is. Kind "bytes" only."""
        if self.kind != "bytes":
            raise DataError(f"encode_bytes needs a tokenizer of kind bytes, got {self.kind}")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int32)

    def token_bytes(self, token):
        """Return the bytes that one id stands for. Raises DataError for an id that is not in the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise DataError(f"token id {token} is not in the vocabulary of {self.vocab_size}")
        if token == self.eot:
            return END_OF_TEXT.encode()
        return self.encoding.decode_single_token_bytes(token) if self.encoding else bytes([token])

    def decode(self, ids):
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD, the end of text becomes <|endoftext|>."""
        decoder = self.stream()
        return decoder.feed_bytes(b"".join(self.token_bytes(int(i)) for i in ids)) + decoder.flush()

    def stream(self):
        """Return a Decoder, which turns ids into text one by one."""
        return Decoder(self)

    def save(self, folder):
        """Write folder/tokenizer.json (and the vocabulary), from which load_tokenizer makes an equal tokenizer."""
        os.makedirs(folder, exist_ok=True)
        description = {"kind": self.kind, "json_escaped": self.json_escaped}
        if self.encoding:
            ranks = self.encoding._mergeable_ranks.items()
            lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
            write_atomically(os.path.join(folder, VOCABULARY_FILE), lines)
            description["name"] = self.encoding.name
            description["pat_str"] = self.encoding._pat_str
            description["special_tokens"] = self.encoding._special_tokens
            description["vocabulary"] = VOCABULARY_FILE
        write_atomically(os.path.join(folder, "tokenizer.json"), json.dumps(description, indent=2).encode())


def load_tokenizer(folder):
    """Return the Tokenizer saved in a dataset's or a run's folder. Raises DataError if it is missing or unreadable."""
    path = os.path.join(folder, "tokenizer.json")
    try:
        with open(path, encoding="utf-8") as f:
            saved = json.load(f)
        if saved["kind"] == "bytes":
            return Tokenizer("bytes", json_escaped=saved["json_escaped"])
        path = os.path.join(folder, saved["vocabulary"])
        with open(path, "rb") as f:
            pairs = (line.split() for line in f if line.strip())
            ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        encoding = need("tiktoken").Encoding(
            saved["name"], pat_str=saved["pat_str"], mergeable_ranks=ranks, special_tokens=saved["special_tokens"]
        )
        return Tokenizer(saved["kind"], encoding, saved["json_escaped"])
    except FileNotFoundError:
        raise DataError(f"{path} is missing: prepare the dataset again, or copy its tokenizer files here") from None
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error!r}): prepare the dataset again") from error


def gpt2_tokenizer(json_escaped=False):
    """Return tiktoken's GPT-2 (vocab_size 50257). Downloads 1.5 MB unless tiktoken has the vocabulary in its cache."""
    tiktoken = need("tiktoken")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on whatever the network layer raises
        raise DataError(
            "cannot download GPT-2's vocab.bpe and encoder.json from openaipublic.blob.core.windows.net "
            f"({type(error).__name__}): go online, or set TIKTOKEN_CACHE_DIR to the cache of a machine that has them"
        ) from error
    return Tokenizer("bpe", encoding, json_escaped)


class Decoder:
    """Turns ids into text as they come.

    feed returns the text that is certain so far and holds back the beginning of a character or of an escape; flush
    returns the rest. All pieces together equal decode(ids).
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # the beginning of an escape

    def feed(self, token):
        """Return the text that one more id makes certain, perhaps an empty str."""
        return self.feed_bytes(self.tokenizer.token_bytes(int(token)))

    def feed_bytes(self, raw, final=False):
        """Return the text that more bytes make certain; with final, the bytes held back as well."""
        text = self.utf8.decode(raw, final)
        if not self.tokenizer.json_escaped:
            return text
        text, self.held = _unescape(self.held + text)
        return text

    def flush(self):
        """Return the rest: U+FFFD for an unfinished character, an unfinished escape as it is."""
        text = self.feed_bytes(b"", final=True) + self.held
        self.utf8.reset()
        self.held = ""
        return text


_ESCAPE = re.compile(
    r"""\\(?: (?P<one> ["\\/bfnrt] )
          |   u (?P<high> [dD][89abAB][0-9a-fA-F]{2} ) \\u (?P<low> [dD][c-fC-F][0-9a-fA-F]{2} )
          |   (?P<cut> (?: u[dD][89abAB][0-9a-fA-F]{2} (?: \\ (?: u (?: [dD] (?: [c-fC-F][0-9a-fA-F]? )? )? )? )?
                         | u[0-9a-fA-F]{0,3} )?  \Z )
          |   u (?P<four> [0-9a-fA-F]{4} ) )""",
    re.VERBOSE,
)
_ONE = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def _unescape(text):
    """Replace the escapes of a JSON string; return (text, the unfinished escape at the end).

    Invalid escapes and halves of surrogate pairs are left as they are, because generated text need not be valid JSON.
    """
    cut = ""

    def replace(match):
        nonlocal cut
        if match["one"]:
            return _ONE[match["one"]]
        if match["high"]:
            return chr(0x10000 + ((int(match["high"], 16) & 0x3FF) << 10) + (int(match["low"], 16) & 0x3FF))
        if match["four"]:
            code = int(match["four"], 16)
            return match[0] if 0xD800 <= code < 0xE000 else chr(code)
        cut = match[0]
        return ""

    return _ESCAPE.sub(replace, text), cut


_CUT = re.compile(r"[^\W_](?=\W)")


def split_long_text(text):
    """Yield a long text in pieces of about PIECE characters that together give the ids of the whole.

    Cuts come between a letter or digit and a character that is neither: none of GPT-2's words spans these two.
    """
    start = 0
    while len(text) - start > 2 * PIECE and (cut := _CUT.search(text, start + PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _utf8(text):
    """Return text as UTF-8. A lone surrogate (half an emoji, or a stray byte of a command line) becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
