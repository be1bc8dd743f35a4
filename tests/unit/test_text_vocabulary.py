"""Vocabularies: read strictly, trained the same everywhere, and BERT's way of cutting words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fleetx.data.text.vocabulary import Vocabulary, make_tokenizer, read_vocabulary, text_vocabulary, train_vocabulary
from fleetx.errors import ConfigError, DataError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = ["The quick brown fox jumps over the lazy dog.", "A quicker fox jumped; lazier dogs over-jumped it!"] * 3


def written(folder: Path, lines: list[str] | bytes) -> Path:
    path = folder / "vocab.txt"
    path.write_bytes(lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode())
    return path


def test_the_line_number_is_the_id(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(written(tmp_path, ["a", *SPECIAL, "##b"]))
    assert vocabulary.ids == {"a": 0, "[PAD]": 1, "[UNK]": 2, "[CLS]": 3, "[SEP]": 4, "[MASK]": 5, "##b": 6}
    assert vocabulary.is_structural().tolist() == [False, True, False, True, True, True, False]
    assert vocabulary.ordinary().tolist() == [0, 6]
    assert read_vocabulary(written(tmp_path, [f"{token}\t{i}" for i, token in enumerate(vocabulary.tokens)])) == vocabulary


BAD = {
    "duplicate": ([*SPECIAL, "a", "b", "a"], "line 8: 'a' is on line 6 already"),
    "no mask": ([*SPECIAL[:4], "a"], r"line 5: the vocabulary ends without \[MASK\]"),
    "empty line": ([*SPECIAL, "", "a"], "line 6: b'' is not a token"),
    "windows": (("\r\n".join([*SPECIAL, "a"]) + "\r\n").encode(), "line 1: has a Windows line end"),
    "byte order mark": (b"\xef\xbb\xbf" + "\n".join([*SPECIAL, "a"]).encode(), "line 1: begins with a byte order mark"),
    "not utf-8": ("\n".join(SPECIAL).encode() + b"\n\xff\n", "line 6: byte 0xff in column 1"),
    "wrong id": ([*SPECIAL, "a\t9"], "line 6: gives 'a' the id '9'; on this line it has to be 5"),
    "empty file": (b"", "the vocabulary ends without"),
    "special only": (SPECIAL, "no tokens beside the special ones"),
}


@pytest.mark.parametrize("lines, reason", BAD.values(), ids=BAD.keys())
def test_a_bad_vocabulary_is_an_error_that_names_the_line(tmp_path: Path, lines: list[str] | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"vocab.txt, .*{reason}"):
        read_vocabulary(written(tmp_path, lines))


def test_a_vocabulary_that_is_not_there_is_not_trained_instead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such vocabulary"):
        read_vocabulary(tmp_path / "vocab.txt")
    with pytest.raises(DataError, match="not a regular file"):
        read_vocabulary(tmp_path)


def test_ids_are_16_bit_while_they_fit() -> None:
    assert Vocabulary((*SPECIAL, *map(str, range(2**16 - 5)))).dtype is np.uint16
    assert Vocabulary((*SPECIAL, *map(str, range(2**16 - 4)))).dtype is np.int32


def test_training_keeps_special_tokens_first_and_every_character() -> None:
    vocabulary = train_vocabulary(TEXT, size=100)
    assert list(vocabulary.tokens[:5]) == SPECIAL
    assert {"a", "##a", "z", "##z", "the", "fox"} <= set(vocabulary.tokens)
    assert vocabulary.size <= 100 and vocabulary.lowercase
    assert make_tokenizer(vocabulary).encode("The FOX!").tokens == ["the", "fox", "!"]


def test_training_gives_the_same_vocabulary_in_every_process() -> None:
    # The library alone does not: it numbers characters in the order of a hash table that is seeded again in each process.
    program = (
        "import sys, sysconfig, pathlib\n"
        "from fleetx.data.text.vocabulary import train_vocabulary\n"
        "texts = pathlib.Path(sysconfig.get_paths()['stdlib'], 'argparse.py').read_text().splitlines()\n"
        "print(train_vocabulary(texts, size=1500).digest)\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = [run.communicate(timeout=120)[0] for run in runs]
    assert digests[0] == digests[1] and len(digests[0].strip()) == 64


def test_words_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    vocabulary = train_vocabulary(TEXT, size=90)
    path = written(tmp_path, text_vocabulary(vocabulary.tokens).encode())
    theirs = BertTokenizer(str(path))
    for text in (*TEXT, "unjumped Überfox, naïve_foxes\tquick-lazy 漢字 €5"):
        assert make_tokenizer(vocabulary).encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_vocabulary_with_capital_letters_is_used_with_them() -> None:
    vocabulary = Vocabulary((*SPECIAL, "Fox", "fox"))
    assert not vocabulary.lowercase
    assert make_tokenizer(vocabulary).encode("Fox fox FOX").tokens == ["Fox", "fox", "[UNK]"]


def test_a_size_that_cannot_hold_the_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size = 20 is too small: special tokens and \d+ characters need \d+"):
        train_vocabulary(TEXT, size=20)
    with pytest.raises(DataError, match="no text to train a vocabulary on"):
        train_vocabulary(["  "], size=100)


def test_training_leaves_no_threads_and_no_environment_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    train_vocabulary(TEXT, size=100)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "fleetx\[text\]"'):
        train_vocabulary(TEXT, size=100)
