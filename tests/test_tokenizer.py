"""Tokenizers lose nothing of a text, are the same when loaded again, and stream the text that they decode."""

import json
import os
import random
import sys
import time

import pytest
from helpers import flip_bits, verify
from test_data import prepare_content, prepare_text, shown
import tiktoken
import tokenizers
import transformers

from sympow.data import DataError
from sympow.data.dataset import Dataset
from sympow.data.huggingface import HuggingFaceEncoding
from sympow.data.mixture import open_dataset
from sympow.data.tokenizer import Tokenizer, load_tokenizer, split_long_text
from sympow.data.vocabulary import gpt2_tokenizer, named_tokenizer, train_tokenizer


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
    hugging_face = [Tokenizer("huggingface", HuggingFaceEncoding(make(ENGLISH).to_str())) for make in HUGGING_FACE]
    return [
        Tokenizer("bytes"),
        Tokenizer("bytes", json_escaped=True),
        Tokenizer("bpe", tiny_encoding()),
        Tokenizer("bpe", tiny_encoding(), json_escaped=True),
        *hugging_face,
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encode_and_decode(text):
    for tok in every_tokenizer():
        ids, decoder = tok.encode(text), tok.stream()
        assert "".join(map(decoder.feed, ids)) + decoder.flush() == text == tok.decode(ids)
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
    monkeypatch.setattr("sympow.data.tokenizer.PIECE", 7)
    assert len(list(split_long_text(texts[-1]))) > 300
    for text, ids in zip(texts, Tokenizer("bpe", encoding, escaped).encode_batch(texts), strict=True):
        assert ids.tolist() == encoding.encode_ordinary(json.dumps(text)[1:-1] if escaped else text)
    for made in () if escaped else (make(texts) for make in HUGGING_FACE):
        theirs = HuggingFaceEncoding(made.to_str())
        assert Tokenizer("huggingface", theirs).encode(texts[3]) == made.encode(texts[3]).ids


def test_a_word_without_end_is_cut_and_loses_nothing():
    text = "a word, and then " + 400_000 * "." + " the end"
    pieces = [*split_long_text(text)]
    assert "".join(pieces) == text and max(map(len, pieces)) == 1 << 17
    tokenizer = Tokenizer("bpe", pairs_encoding())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_token_text_is_ordinary_text():
    for tok in every_tokenizer()[:-1]:  # the last one's end of text has another name
        assert tok.eot not in tok.encode("a<|endoftext|>b")
        assert tok.decode([tok.encode("a")[0], tok.eot]) == "a<|endoftext|>"


def test_lone_surrogates_do_not_stop_encoding():
    for tok in every_tokenizer():
        assert tok.decode(tok.encode("a\ud83db")) == ("a\\ud83db" if tok.json_escaped else "a\ufffdb")


@pytest.mark.parametrize("number", range(6))
def test_saved_tokenizer_is_the_same_tokenizer(tmp_path, number, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", None)  # a saved tokenizer never asks for a download
    tok = every_tokenizer()[number]
    tok.save(tmp_path / "a")
    load_tokenizer(tmp_path / "a").save(tmp_path / "b")  # as a run folder copies it
    loaded = load_tokenizer(tmp_path / "b")
    for name in ("kind", "vocab_size", "eot", "json_escaped"):
        assert getattr(loaded, name) == getattr(tok, name)
    for text in TEXTS:
        assert loaded.encode(text) == tok.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.tiktoken"])
def test_a_flipped_bit_in_a_tokenizer_is_one_line_and_no_panic(tmp_path, name, capfd):
    Tokenizer("bpe", tiny_encoding()).save(tmp_path)
    for _ in flip_bits(tmp_path / name):
        refused(tmp_path, "damaged")
    assert capfd.readouterr().err == ""  # where Rust would print its panic


def refused(folder, reason, load=load_tokenizer):
    with pytest.raises(DataError, match=reason) as error:
        load(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500 and str(folder) in str(error.value)


def test_a_panic_in_rust_is_one_line(tmp_path, monkeypatch):
    Tokenizer("bpe", tiny_encoding()).save(tmp_path)
    panic = type("PanicException", (BaseException,), {})

    def panicking(*args, **options):
        raise panic("no entry found for key\nat src/lib.rs")

    monkeypatch.setattr(tiktoken, "Encoding", panicking)
    refused(tmp_path, "tokenizer.json is damaged .*PanicException: no entry found for key at src/lib.rs")
    monkeypatch.setattr(tiktoken, "Encoding", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["words", []])
def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path, kind):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"kind": kind}))
    refused(tmp_path, "tokenizer.json is damaged")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, b"\xff", '{"eos_token": 5}', '{"eos_token": {}}'])
@pytest.mark.parametrize(
    "file,load",
    [
        ("tokenizer.json", load_tokenizer),
        ("vocab.json", load_tokenizer),
        ("tokenizer.json", named_tokenizer),
        ("tokenizer_config.json", named_tokenizer),
    ],
)
def test_a_damaged_or_missing_file_of_a_tokenizer_is_one_line(tmp_path, capfd, file, load, content):
    text = byte_level(ENGLISH).to_str()
    Tokenizer("huggingface", HuggingFaceEncoding(text)).save(tmp_path)
    if load is not load_tokenizer:
        (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, "tokenizer.*damaged", load)
    assert capfd.readouterr().err == ""
    (tmp_path / "tokenizer.json").unlink()
    refused(tmp_path, "tokenizer.json (is missing|does not exist)", load)


# one's own tokenizer


def byte_level(texts, size=400):
    """Return a tokenizer as GPT-2's family has it: byte-level BPE."""
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=level.alphabet(), show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def sentence_piece(texts):
    """Return a tokenizer as Llama 2 has it: spaces are marks, and other bytes have ids of their own."""
    parts = tokenizers.normalizers, tokenizers.decoders
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = parts[0].Sequence([parts[0].Prepend("▁"), parts[0].Replace(" ", "▁")])
    made.decoder = parts[1].Sequence(
        [parts[1].Replace("▁", " "), parts[1].ByteFallback(), parts[1].Fuse(), parts[1].Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


ENGLISH = ["the theme then is a theory of the thing, they thought. " * 20]
HUGGING_FACE = {byte_level: "<|endoftext|>", sentence_piece: "</s>"}  # and the end of text


@pytest.mark.parametrize("make, end", HUGGING_FACE.items())
def test_a_tokenizer_json_of_hugging_face_is_used_saved_and_streamed(tmp_path, make, end):
    made = make(ENGLISH)
    made.enable_truncation(3)
    made.enable_padding(length=99)
    made.save(str(tmp_path / "tokenizer.json"))
    tok = named_tokenizer(str(tmp_path))
    assert tok.vocab_size > tok.eot and tok.decode([tok.eot]) == end
    tok.save(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    assert loaded.files() == tok.files()
    for text in [*TEXTS, "x </s> y<|endoftext|>", *ENGLISH]:
        ids = loaded.encode(text)
        decoder = loaded.stream()
        pieces = [decoder.feed(i) for i in ids]
        assert "\ufffd" not in "".join(pieces) and "".join(pieces) + decoder.flush() == text == tok.decode(ids)
        assert tok.eot not in ids or end in text
        for i in [i for i in range(min(len(ids), 40)) if not tok.decode(ids[:i]).endswith("\ufffd")]:
            decoder = loaded.stream(ids[:i])
            assert tok.decode(ids[:i]) + "".join(map(decoder.feed, ids[i:])) + decoder.flush() == text
    assert tok.eot not in tok.encode(f"a{end}b") and len(tok.encode("q" * 200)) > 99


@pytest.mark.parametrize("make", HUGGING_FACE)
def test_bytes_that_are_no_text_stream_as_transformers_decodes_them(make):
    """One such byte makes U+FFFD of all adjacent ids of single bytes, so these come when the last of them is known."""
    generator, tok = random.Random(1), Tokenizer("huggingface", HuggingFaceEncoding(make(ENGLISH).to_str()))
    hugging_face = transformers.PreTrainedTokenizerFast(tokenizer_object=tok.encoding.tokenizer)
    for _ in range(1000):
        ids = generator.choices(range(tok.vocab_size), k=generator.randrange(12))
        text = hugging_face.decode(ids)
        assert tok.decode(ids) == text
        for i in range(len(ids)):
            prompt, decoder = hugging_face.decode(ids[:i]), tok.stream(ids[:i])
            if text.startswith(prompt) and not prompt.endswith("\ufffd"):
                assert prompt + "".join(map(decoder.feed, ids[i:])) + decoder.flush() == text


def test_a_prompt_that_ends_with_ids_of_bytes_goes_on():
    tok = Tokenizer("huggingface", HuggingFaceEncoding(sentence_piece(ENGLISH).to_str()))
    ids = tok.encode("the 日本語日本語, the")
    decoder = tok.stream(ids[:14])  # of 18 bytes 12
    assert "".join(map(decoder.feed, ids[14:])) + decoder.flush() == "本語, the"


def test_the_end_of_text_is_what_the_model_says(tmp_path):
    made = byte_level(ENGLISH)
    made.add_special_tokens(["<|endoftext|>", "<|stop|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    config, special = (tmp_path / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map"))
    for said in ("<|stop|>", {"content": "<|stop|>"}, None):  # in the end, only in the file of earlier versions
        config.write_text(json.dumps({"eos_token": said} if said else {}))
        special.write_text(json.dumps({"eos_token": "<|endoftext|>" if said else "<|stop|>"}))
        tok = named_tokenizer(str(tmp_path / "tokenizer.json"))
        assert tok.eot == made.token_to_id("<|stop|>") and tok.decode([tok.eot]) == "<|stop|>"
    tok.save(tmp_path / "run")
    assert load_tokenizer(tmp_path / "run").eot == tok.eot
    config.write_text(json.dumps({"eos_token": "<|new|>"}))  # which transformers adds
    tok = named_tokenizer(str(tmp_path))
    assert tok.eot == made.get_vocab_size() == tok.vocab_size - 1 and tok.decode([tok.eot]) == "<|new|>"


def test_a_vocabulary_with_an_id_twice_and_a_text_that_it_has_no_ids_for_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]")).to_str()
    with pytest.raises(DataError, match="the text cannot be encoded by this tokenizer .*UNK"):
        Tokenizer("huggingface", HuggingFaceEncoding(words)).encode("b")
    for number in (0, 2):  # or the end of text becomes number 2
        (tmp_path / "tokenizer.json").write_text(words.replace('"a":0', f'"a":0,"b":{number}'))
        refused(tmp_path, "tokenizer.json is damaged .*an id stands twice", named_tokenizer)


@pytest.mark.parametrize(
    "name, message",
    [
        ("bpe:256", "257 .*to 1048576 ids, got 'bpe:256'"),
        ("bpe:", "got 'bpe:'"),
        ("bpe:many", "got 'bpe:many'"),
        ("bpe:-5", "got 'bpe:-5'"),
        ("bpe:²", "got 'bpe:²'"),
        ("bpe:9999999999", "got 'bpe:9999999999'"),
        ("gpt3", "must be bytes, gpt2, bpe:SIZE or the path of a tokenizer.json, got 'gpt3'"),
        ("nowhere/tokenizer.json", "nowhere/tokenizer.json does not exist"),
    ],
)
def test_other_names_of_tokenizers_are_one_line(name, message):
    with pytest.raises(DataError, match=message):
        named_tokenizer(name)


def test_without_the_package_one_line_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for act in (lambda: train_tokenizer(["text"], 300), lambda: named_tokenizer(str(tmp_path))):
        with pytest.raises(DataError, match="cannot import tokenizers .*: run pip install tokenizers"):
            act()


def test_a_trained_tokenizer_loses_nothing_and_is_the_same_each_time():
    tok = train_tokenizer(ENGLISH, 280)
    assert (tok.kind, tok.vocab_size, tok.eot) == ("bpe", 280, 279)
    assert tok.files() == train_tokenizer(ENGLISH, 280).files()
    assert len(tok.encode(ENGLISH[0])) < len(ENGLISH[0]) / 2
    for text in TEXTS:
        assert tok.decode(tok.encode(text)) == text
    assert train_tokenizer(["ab"], 5000).vocab_size == 257  # no pair stands twice


def test_training_on_words_without_end_takes_no_longer_than_on_others():
    began = time.process_time()
    for text in ("q" * 200_000, " " * 200_000, "ACGT" * 50_000, "=-" * 100_000):  # each took a minute and more
        tok = train_tokenizer([text], 280)
        assert tok.vocab_size > 257 and tok.decode(tok.encode(text[:5000])) == text[:5000]
    assert time.process_time() - began < 20


def test_text_is_prepared_with_a_tokenizer_trained_on_its_training_split(tmp_path):
    content = "".join(f"the {i}th theme of them\n" for i in range(900)) + "zqzqzqzq " * 400
    options = ["--document_length=64", "--tokenizer=bpe:300", "--val_fraction=0.2"]
    dataset = prepare_content(tmp_path, content, *options)
    tok = dataset.tokenizer
    assert dataset.vocab_size == 300 and tok.decode(dataset.read("train", 0, 8)).startswith("the 0th theme")
    assert len(tok.encode(" them")) == 1 and dataset.meta["arguments"]["tokenizer"] == "bpe:300"
    assert "zqzqzqzq" in shown(dataset, "val")  # the end, which does not train it
    assert tok.token_bytes(tok.encode("zqzq")[0]) == b"z"
    (tmp_path / "out/train_00000.bin").unlink()
    prepare_text(tmp_path, tmp_path / "a.txt", *options)
    verify(dataset)  # the split and the tokenizer are the same


def test_a_trained_tokenizer_serves_another_dataset_and_both_may_be_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    trained = prepare_content(tmp_path / "a", "the theme of them\n" * 900, "--tokenizer=bpe:300").path
    for source in (trained, os.path.join(trained, "tokenizer.json")):
        second = prepare_content(tmp_path / "b", "other themes\n" * 900, f"--tokenizer={source}")
    assert second.tokenizer.files() == Dataset(trained).tokenizer.files()
    os.rename(second.path, tmp_path / "second")
    assert open_dataset(f"{trained}:1,{tmp_path / 'second'}:1").vocab_size > 257


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


@pytest.mark.parametrize(
    "escape",
    [
        *("\\", "\\u", "\\u00", "\\ud83d", "\\ud83d\\", "\\ud83d\\ude0"),  # cut off at the end
        *("\\x41", "\\u12g4", "\\ud83d and \\ude00", "\\ud83d\\u0041"),
    ],
)
def test_escapes_that_are_cut_off_or_invalid_are_left_as_they_are(escape):
    tok = Tokenizer("bytes", json_escaped=True)
    assert tok.decode(list((r"a\n" + escape).encode())) == "a\n" + escape.replace("\\u0041", "A")


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
