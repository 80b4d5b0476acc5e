"""Read and write a tokenizer.json of Hugging Face's `tokenizers`.

encoding = read_huggingface("llama/tokenizer.json")         # to give to data.tokenizer.Tokenizer("huggingface", ...)
text, end_name = tokenizers_json(tokenizer)                 # of a data.tokenizer.Tokenizer
"""

import os
from contextlib import contextmanager

from . import DataError, describe_error, need
from .files import read_json

# How an end of text is called where no tokenizer_config.json beside tokenizer.json says so; the first that is there.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class HuggingFaceEncoding:
    """A tokenizers.Tokenizer with the methods of a tiktoken.Encoding that data.tokenizer uses.

    Attributes: vocabulary ({token: id}), n_vocab (the highest id + 1), json (the contents of its tokenizer.json),
    eot_token (id of the end of text, added if the tokenizer has none), end_name (its name), start_token (id that the
    tokenizer puts before a text, or else eot_token), and byte_ids (the ids of single bytes, where there are such ids).
    """

    def __init__(self, text, end_name=None):
        """text: the contents of tokenizer.json; end_name: the end of text, found by its usual names if it is None.

        Raises the exceptions of the package, which are of no particular type, if the text is damaged.
        """
        tokenizers = need("tokenizers")
        self.tokenizer = tokenizers.Tokenizer.from_str(text)
        self.tokenizer.no_truncation()  # to a length that suits another model
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # their text in a document is ordinary text
        names = [end_name] if end_name else END_NAMES
        self.end_name = next((name for name in names if self.tokenizer.token_to_id(name) is not None), names[0])
        if self.tokenizer.token_to_id(self.end_name) is None:
            self.tokenizer.add_special_tokens([tokenizers.AddedToken(self.end_name, special=True, normalized=False)])
        self.eot_token = self.tokenizer.token_to_id(self.end_name)
        self.start_token = [*self.tokenizer.encode("").ids, self.eot_token][0]
        self.vocabulary = self.tokenizer.get_vocab()
        self.byte_ids = {self.vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)}
        ids = self.vocabulary.values()
        self.n_vocab = max(ids) + 1
        if len(set(ids)) < len(ids):  # the package may give the end of text an id that is taken, if some are left out
            raise ValueError("an id stands twice")
        self.json = self.tokenizer.to_str()

    def encode_ordinary_batch(self, texts, num_threads):
        """Return a list of ids for each text; the package itself chooses the number of threads (it uses all cores)."""
        with one_line("the text", "cannot be encoded by this tokenizer"):  # a WordLevel without [UNK], for example
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids):
        """Return the text of ids, with the text of special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def read_huggingface(path):
    """Return the HuggingFaceEncoding of a tokenizer.json. Raises DataError if it cannot be read or used.

    The end of text is the eos_token of a tokenizer_config.json beside it, or of a special_tokens_map.json, or else the
    first of END_NAMES.
    """
    end_name = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = os.path.join(os.path.dirname(path), name)
        if os.path.exists(config):
            with one_line(config):
                end_name = read_json(config).get("eos_token", end_name)
                end_name = end_name["content"] if isinstance(end_name, dict) else end_name
                if not isinstance(end_name, str | None):
                    raise TypeError("eos_token is no text")
    with one_line(path), open(path, encoding="utf-8") as f:
        return HuggingFaceEncoding(f.read(), end_name)


@contextmanager
def one_line(name, problem="is damaged or no tokenizer"):
    """Turn whatever goes wrong with a tokenizer's file, or with a text, into a DataError of one line: name, problem.

    tiktoken and tokenizers are written in Rust. Its panics are no Exception and have a type that cannot be imported.
    """
    try:
        yield
    except (DataError, FileNotFoundError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt
        raise DataError(f"{name} {problem} ({describe_error(error)})") from error


def characters_of_bytes():
    """Return {byte: character} of GPT-2's writing of bytes: printable ones as they are, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(shifted)}


def tokenizers_json(tokenizer):
    """Return (the contents of a tokenizer.json for the packages tokenizers and transformers, the name of the end of
    text there) of a data.tokenizer.Tokenizer.

    Escaping, which those packages do not have, is left out. Raises DataError if there is no vocabulary.
    """
    tokenizers = need("tokenizers")
    if tokenizer.kind == "ids":
        raise DataError("a tokenizer without a vocabulary cannot be written: prepare the data with GPT-2's vocabulary")
    if tokenizer.kind == "huggingface":
        return tokenizer.encoding.json, tokenizer.encoding.end_name
    characters = characters_of_bytes()

    def write(token):
        return "".join(characters[byte] for byte in token)

    in_words = tokenizer.kind == "bpe"  # GPT-2's; bytes stand alone
    ranks = tokenizer.encoding._mergeable_ranks if in_words else {bytes([byte]): byte for byte in range(256)}
    # tiktoken merges two tokens by the rank of what they come to, whatever they are
    halves = sorted((rank, token[:i], token[i:]) for token, rank in ranks.items() for i in range(1, len(token)))
    merges = [(write(a), write(b)) for _, a, b in halves if a in ranks and b in ranks]
    vocabulary = {write(token): rank for token, rank in ranks.items()}
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=in_words)
    written = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    written.pre_tokenizer, written.decoder = level, tokenizers.decoders.ByteLevel()
    end = next(iter(tokenizer.encoding._special_tokens)) if in_words else "<|endoftext|>"
    written.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return written.to_str(), end
