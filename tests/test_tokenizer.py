"""Tokenizers lose nothing of a text, are the same when loaded again, and stream the text that they decode."""

import json
import random
import tracemalloc

import pytest
import tiktoken

from data import DataError
from data.tokenizer import Decoder, Tokenizer, gpt2_tokenizer, load_tokenizer, split_long_text

TEXTS = [
    "",
    "the theme then",
    "naïve café 日本語 😀🎉 \U0001f469\u200d\U0001f680",
    'a "quoted"\\path\n\ttab \x00 \x7f /',
    "<|endoftext|>",
]


def tiny_encoding():
    """Return an encoding of all bytes, a few merges, and pieces that end inside a character or an escape."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"\\u", b"\\u0", b"\xf0\x9f", b"\xe6\x97"]
    pattern = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        "tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(tokens)}
    )


def every_tokenizer():
    return [
        Tokenizer("bytes"),
        Tokenizer("bytes", json_escaped=True),
        Tokenizer("bpe", tiny_encoding()),
        Tokenizer("bpe", tiny_encoding(), json_escaped=True),
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encode_and_decode(text):
    for tok in every_tokenizer():
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert all(0 <= i < tok.vocab_size and isinstance(i, int) for i in ids)


GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def pairs_encoding():
    """Return an encoding of all bytes and 65,000 pairs of them, which splits words as GPT-2 does."""
    tokens = [bytes([i]) for i in range(256)] + [bytes(divmod(i, 256)) for i in range(65000)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("p", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 65256})


@pytest.mark.parametrize("escaped", [False, True])
def test_long_texts_in_pieces_give_the_same_tokens(escaped, monkeypatch):
    generator, encoding = random.Random(1), pairs_encoding()
    parts = "word Wörter 日本語 。 12 ٣ ² 's ' _ - e\u0301".split() + [" ", "  ", "\n", "\n\n ", "\t"]
    texts = ["".join(generator.choices(parts, k=k)) for k in (0, 1, 5, 300, 3000)]
    monkeypatch.setattr("data.tokenizer.PIECE", 7)
    monkeypatch.setattr("data.tokenizer.AT_ONCE", 100)
    assert len(list(split_long_text(texts[-1]))) > 300
    for text, found in zip(texts, Tokenizer("bpe", encoding, escaped).encode_batch(texts), strict=True):
        assert found.tolist() == encoding.encode_ordinary(json.dumps(text)[1:-1] if escaped else text)


def test_memory_of_long_texts_is_little_more_than_their_tokens(monkeypatch):
    monkeypatch.setattr("data.tokenizer.AT_ONCE", 1 << 14)
    tokenizer, text = Tokenizer("bpe", pairs_encoding()), "ab cd, " * 50_000
    tracemalloc.start()
    try:
        (ids,) = tokenizer.encode_batch([text])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(ids) == 250_000 and peak < 4 * ids.nbytes  # two arrays; lists of integers are ten times as large


def test_special_token_text_is_ordinary_text():
    for tok in every_tokenizer():
        assert tok.eot not in tok.encode("a<|endoftext|>b")
        assert tok.decode([tok.encode("a")[0], tok.eot]) == "a<|endoftext|>"


def test_sizes_and_end_of_text():
    assert (Tokenizer("bytes").vocab_size, Tokenizer("bytes").eot) == (257, 256)
    tok = Tokenizer("bpe", tiny_encoding())
    assert (tok.vocab_size, tok.eot) == (264, 263)
    assert tok.encode(" the") == [258]


def test_bytes_are_stored_as_they_are():
    raw = bytes(range(256))
    assert Tokenizer("bytes").encode_bytes(raw).tolist() == list(raw)
    with pytest.raises(DataError):
        Tokenizer("bpe", tiny_encoding()).encode_bytes(raw)


def test_lone_surrogates_do_not_stop_encoding():
    assert Tokenizer("bytes").decode(Tokenizer("bytes").encode("a\ud83db")) == "a\ufffdb"
    tok = Tokenizer("bpe", tiny_encoding())
    assert tok.decode(tok.encode("a\ud83db")) == "a\ufffdb"


@pytest.mark.parametrize("which", range(4))
def test_saved_tokenizer_is_the_same_tokenizer(tmp_path, which, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", None)  # a saved tokenizer never asks for a download
    tok = every_tokenizer()[which]
    tok.save(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save(tmp_path / "b")  # as a run folder copies it
    again = load_tokenizer(tmp_path / "b")
    for name in ("kind", "vocab_size", "eot", "json_escaped"):
        assert getattr(again, name) == getattr(tok, name)
    for text in TEXTS:
        assert again.encode(text) == tok.encode(text)


def test_missing_or_damaged_tokenizer_is_one_line(tmp_path):
    with pytest.raises(DataError, match="tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe"}')
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(tmp_path)


def test_stream_never_shows_half_a_character():
    text = "naïve 日本 😀"
    for tok in every_tokenizer():
        decoder = tok.stream()
        pieces = [decoder.feed(i) for i in tok.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + decoder.flush() == text
    decoder = Tokenizer("bytes").stream()
    assert [decoder.feed(b) for b in "é".encode()] == ["", "é"]
    assert decoder.feed("é".encode()[0]) + decoder.flush() == "\ufffd"


def test_stream_equals_decode_for_any_ids():
    generator = random.Random(0)
    for tok in every_tokenizer():
        for _ in range(100):
            ids = [generator.randrange(tok.vocab_size) for _ in range(30)]
            ids += generator.choices(list(b'\\\\\\uudD8389aA"n'), k=60) + ids[:5]  # near-escapes, cut off anywhere
            decoder = tok.stream()
            assert "".join(map(decoder.feed, ids)) + decoder.flush() == tok.decode(ids)


def test_escapes_are_shown_when_they_are_whole():
    decoder = Tokenizer("bytes", json_escaped=True).stream()
    shown = [decoder.feed(b) for b in rb"a\nb\\n\u00e9\ud83d\ude00."]
    assert "".join(shown) == "a\nb\\né😀."
    assert all(piece in ("", "a", "\n", "b", "\\", "n", "é", "😀", ".") for piece in shown)


@pytest.mark.parametrize("cut", ["\\", "\\u", "\\u00", "\\ud83d", "\\ud83d\\", "\\ud83d\\ude0"])
def test_cut_off_escape_at_the_end_is_tolerated(cut):
    tok = Tokenizer("bytes", json_escaped=True)
    assert tok.decode(list((r"a\n" + cut).encode())) == "a\n" + cut


@pytest.mark.parametrize("wrong", ["\\x41", "\\u12g4", "\\ud83d and \\ude00", "\\ud83d\\u0041"])
def test_invalid_escapes_are_left_as_they_are(wrong):
    tok = Tokenizer("bytes", json_escaped=True)
    assert tok.decode(list(wrong.encode())) == wrong.replace("\\u0041", "A")


def test_escaped_prompt_is_what_json_makes_of_it():
    tok = Tokenizer("bytes", json_escaped=True)
    assert bytes(tok.encode('é "x"\n')) == json.dumps('é "x"\n')[1:-1].encode()


def test_ids_beyond_the_vocabulary_are_refused():
    for tok in every_tokenizer():
        with pytest.raises(DataError, match=f"{tok.vocab_size}"):
            tok.decode([tok.vocab_size])


def test_gpt2_comes_from_tiktoken_and_names_its_download(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny_encoding() if name == "gpt2" else None)
    assert gpt2_tokenizer().kind == "bpe" and gpt2_tokenizer(json_escaped=True).json_escaped

    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match="openaipublic.blob.core.windows.net.*TIKTOKEN_CACHE_DIR"):
        gpt2_tokenizer()


def test_decoder_is_a_tokenizers_stream():
    assert isinstance(Tokenizer("bytes").stream(), Decoder)
