"""Choose the vocabulary of data that are prepared: GPT-2's, the file of another model, or one trained on the text.

tokenizer = named_tokenizer("gpt2")                     # or bytes, or the path of a tokenizer.json
tokenizer = train_tokenizer(texts, trained_size("bpe:8192"))
"""

import os
import re

from . import DataError, need
from .files import read_json
from .huggingface import characters_of_bytes, one_line, read_huggingface
from .progress import waiting
from .tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

# GPT-2's words, in the form in which tiktoken is fastest
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
LARGEST = 1 << 20  # ids in a vocabulary that is trained
LONG_WORD = re.compile(r"\w{1000}|\s{1000}|[^\w\s]{1000}")


def named_tokenizer(name):
    """Return the Tokenizer that --tokenizer=name asks for: bytes, gpt2, or the path of a tokenizer.json or of the
    folder that it is in, which may be a dataset or a run.

    Returns None for bpe:SIZE, which is trained on the text. Raises DataError for other names.
    """
    if name == "bytes":
        return Tokenizer("bytes")
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("bpe:"):
        trained_size(name)
        return None
    path = os.path.join(name, "tokenizer.json") if os.path.isdir(name) else name
    if not path.endswith(".json"):
        raise DataError(f"--tokenizer must be bytes, gpt2, bpe:SIZE or the path of a tokenizer.json, got {name!r}")
    if not os.path.exists(path):
        raise DataError(f"--tokenizer={path} does not exist")
    if {"kind", "json_escaped"} <= read_json(path).keys():  # ours, and not Hugging Face's
        return load_tokenizer(os.path.dirname(path))
    return Tokenizer("huggingface", read_huggingface(path))


def trained_size(name):
    """Return SIZE of bpe:SIZE. Raises DataError if it is no size of a vocabulary."""
    size = name.removeprefix("bpe:")
    if not (size.isdecimal() and 257 <= int(size) <= LARGEST):
        raise DataError(
            f"--tokenizer=bpe:SIZE needs 257 (256 bytes and the end of text) to {LARGEST} ids, got {name!r}"
        )
    return int(size)


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


@waiting("training the tokenizer")
def train_tokenizer(texts, vocab_size):
    """Return a Tokenizer of kind "bpe" with at most vocab_size ids. The last one is the end of text.

    texts: an iterable of str. Any text is encoded without loss, because all 256 bytes are in the vocabulary. Text with
    few different words gives fewer ids.
    """
    tiktoken = need("tiktoken")
    ranks = train_byte_pairs(texts, vocab_size - 1)
    special = {END_OF_TEXT: len(ranks)}
    name = f"bpe:{vocab_size}"
    return Tokenizer("bpe", tiktoken.Encoding(name, pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special))


def train_byte_pairs(texts, size):
    """Return {bytes: id} of a byte-level BPE with at most `size` ids, trained on an iterable of str.

    Ids below 256 are the single bytes; the others are in the order of their merges, as tiktoken needs it. Words are
    split as GPT-2 splits them. The same texts in the same order give the same ids.
    """
    tokenizers = need("tokenizers")
    need("tokenizers.trainers")
    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False, use_regex=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=sorted(level.alphabet()), show_progress=False
    )
    with one_line("the text for the tokenizer"):
        tokenizer.train_from_iterator((piece for text in texts for piece in _cut_long_words(text)), trainer)
    byte_of_character = {character: byte for byte, character in characters_of_bytes().items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of_character[c] for c in token): number for token, number in vocabulary}


def _cut_long_words(text):
    """Yield a text in pieces without a word above 1,000 characters, such as encoded data or many spaces: training takes
    the square of a word's length, half an hour for a million characters."""
    start = 0
    for match in LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]
