"""Raw text from files to batches: what is in them, what they depend on, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fleetx.data.loader import Loader
from fleetx.data.text.from_paths import is_test_file, stdlib_files, text_source
from fleetx.data.text.tensors import compact, widened
from fleetx.data.text.text_source import TextSource
from fleetx.errors import ConfigError, DataError, FleetWarning
from tests.helpers.harness import raised, run_ranks

WORDS = "time year people way day man thing woman life child world school state family student group country problem".split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents of a few hundred words, and an empty cache beside them."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    for number in range(20):
        path = folder / "data" / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [" ".join(generator.choice(WORDS, generator.integers(3, 12))) + "." for _ in range(30)]
        path.write_text("\n".join(sentences) + "\n\n")
    return folder


def load(corpus: Path, **options: object) -> TextSource:
    options = {"max_seq_len": 40, "vocab_size": 200, "cache_dir": corpus / "cache"} | options
    return text_source(corpus / "data", **options)  # type: ignore[arg-type]


def tensors(batch: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if value is not None}


def unmasked(batch: dict[str, Tensor | None]) -> Tensor:
    found = tensors(batch)
    ids = found["input_ids"].clone()
    ids.view(-1)[found["mlm_positions"].long()] = found["mlm_labels"]
    return ids


def read(source: TextSource, epoch: int, indices: npt.ArrayLike) -> dict[str, Tensor | None]:
    packed, complaints = source.batch(epoch, np.atleast_1d(indices))
    assert complaints == []
    return source.finish(packed)


# --- what a batch is


def test_a_sample_is_cls_a_sep_b_sep_of_text_that_stands_in_the_files(corpus: Path) -> None:
    source = load(corpus)
    texts = [" ".join(path.read_text().replace(".", " .").split()) for path in sorted((corpus / "data").rglob("*.txt"))]
    tokens = source.vocabulary.tokens
    for index in range(len(source)):
        batch = read(source, 0, index)
        length = int(tensors(batch)["attention_mask"].sum()) if batch["attention_mask"] is not None else 40
        words = [tokens[number] for number in unmasked(batch)[0, :length].tolist()]
        assert words[0] == "[CLS]" and words[-1] == "[SEP]" and words.count("[SEP]") == 2
        middle = words.index("[SEP]")
        a, b = (" ".join(part).replace(" ##", "").removeprefix("##") for part in (words[1:middle], words[middle + 1 : -1]))
        in_a, in_b = ({number for number, text in enumerate(texts) if part in text} for part in (a, b))
        assert in_a and in_b
        types = tensors(batch)["token_type_ids"][0].tolist()
        assert types == [0] * (middle + 1) + [1] * (length - middle - 1) + [0] * (len(types) - length)
        if int(tensors(batch)["next_sentence_label"]) == 0:
            assert any(f"{a} {b}" in text or f"{a}{b}" in text for text in texts)


def test_masked_places_and_labels_fit_and_special_tokens_are_never_masked(corpus: Path) -> None:
    source = load(corpus)
    batch = read(source, 0, np.arange(30))
    found = tensors(batch)
    assert {name: value.dtype for name, value in found.items()} == {
        "input_ids": torch.int64,
        "token_type_ids": torch.int64,
        "attention_mask": torch.bool,
        "mlm_positions": torch.int64,
        "mlm_labels": torch.int64,
        "next_sentence_label": torch.int64,
    } or "attention_mask" not in found
    structural = [source.vocabulary.ids[token] for token in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")]
    assert not torch.isin(found["mlm_labels"], torch.tensor(structural)).any()
    whole = unmasked(batch)
    candidates = (~torch.isin(whole, torch.tensor(structural, dtype=whole.dtype))).sum(1)
    rows = found["mlm_positions"] // whole.shape[1]
    assert torch.bincount(rows, minlength=30).tolist() == [max(1, round(0.15 * int(count))) for count in candidates]


def test_full_batches_have_no_mask_and_others_are_padded_to_a_multiple_of_eight(corpus: Path) -> None:
    source = load(corpus, max_seq_len=500)
    widths = set()
    for index in range(len(source)):
        batch = read(source, 0, index)
        width = tensors(batch)["input_ids"].shape[1]
        mask = batch["attention_mask"]
        used = int(mask.sum()) if mask is not None else width
        assert width % 8 == 0 and width - used < 8 and (mask is None) == (used == width)
        assert (tensors(batch)["input_ids"][0, used:] == source.vocabulary.ids["[PAD]"]).all()
        widths.add(width)
    assert len(widths) > 1
    full = read(load(corpus), 0, np.arange(8))
    assert full["attention_mask"] is None and tensors(full)["input_ids"].shape == (8, 40)


# --- what it depends on


def test_a_sample_is_the_same_in_any_batch_order_and_source_object(corpus: Path) -> None:
    source, again = load(corpus, seed=7), load(corpus, seed=7)
    indices = np.random.default_rng(1).permutation(len(source))[:24]
    batch = tensors(read(source, 3, indices))
    for row, index in enumerate(indices):
        alone = tensors(read(again, 3, index))
        width = alone["input_ids"].shape[1]
        torch.testing.assert_close(alone["input_ids"][0], batch["input_ids"][row, :width], rtol=0, atol=0)
        mine = batch["mlm_positions"] // batch["input_ids"].shape[1] == row
        torch.testing.assert_close(alone["mlm_labels"], batch["mlm_labels"][mine], rtol=0, atol=0)
        torch.testing.assert_close(
            alone["mlm_positions"], batch["mlm_positions"][mine] % batch["input_ids"].shape[1], rtol=0, atol=0
        )
        assert alone["next_sentence_label"][0] == batch["next_sentence_label"][row]


def test_epochs_and_seeds_differ_in_training_and_epochs_do_not_in_evaluation(corpus: Path) -> None:
    source = load(corpus)
    evaluation = load(corpus, train=False, vocab_path=source.vocabulary_file)
    indices = np.arange(16)
    first = tensors(read(source, 0, indices))
    for other in (read(source, 1, indices), read(load(corpus, seed=1), 0, indices)):
        assert not torch.equal(first["mlm_positions"], tensors(other)["mlm_positions"])
        assert not torch.equal(first["next_sentence_label"], tensors(other)["next_sentence_label"])
    for name, value in tensors(read(evaluation, 0, indices)).items():
        torch.testing.assert_close(value, tensors(read(evaluation, 5, indices))[name], rtol=0, atol=0)


def test_a_cache_hit_gives_the_same_bits_and_maps_the_tokens(corpus: Path, tmp_path: Path) -> None:
    cold, warm = (load(corpus, cache_dir=tmp_path) for _ in range(2))
    assert isinstance(warm.pairs.tokens, np.memmap) and warm.pairs.tokens.dtype == np.uint16
    assert np.shares_memory(warm.pairs.tokens, warm._tokens)
    a, b = (tensors(read(source, 2, np.arange(len(source)))) for source in (cold, warm))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.txt").write_text("one two three four five six seven\n" * 20)
    before = load(tmp_path)
    (tmp_path / "data" / "b.txt").write_text("one two three four five six seven\n" * 200)
    assert len(load(tmp_path)) > len(before)


# --- batches planned by tokens


def test_planned_batches_stay_within_the_tokens_and_give_every_sample_once(corpus: Path) -> None:
    source, single = load(corpus, max_seq_len=200, tokens_per_batch=640), load(corpus, max_seq_len=200)
    assert source.plans_batches and not single.plans_batches and len(source) < len(single)
    rows = 0
    for number in range(len(source)):
        ids = tensors(read(source, 0, number))["input_ids"]
        assert ids.numel() <= 640
        rows += len(ids)
    assert rows == len(single)
    with pytest.raises(ConfigError, match="request one"):
        source.batch(0, np.array([0, 1]))


def test_fewer_tokens_per_batch_than_one_sequence_are_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="199 tokens per batch are fewer than one sequence of max_seq_len = 200"):
        load(corpus, max_seq_len=200, tokens_per_batch=199)


@pytest.mark.parametrize("tokens", [None, 400])
def test_the_loader_gives_the_same_batches_with_and_without_workers(corpus: Path, tokens: int | None, alone: None) -> None:
    runs = []
    for workers in (0, 2):
        loader = Loader(load(corpus, tokens_per_batch=tokens), 8, shuffle=True, seed=3, workers=workers)
        runs.append([tensors(batch) for batch in loader])
    assert len(runs[0]) == len(runs[1]) > 3
    for a, b in zip(*runs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


# --- what is refused


@pytest.mark.parametrize(
    "option, value",
    [
        ("max_seq_len", 4),
        ("max_seq_len", True),
        ("max_seq_len", 128.0),
        ("seed", -1),
        ("vocab_size", 0),
        ("masked_share", 0),
        ("masked_share", float("nan")),
        ("masked_share", True),
        ("tokens_per_batch", True),
        ("kind", "digitl"),
        ("suffixes", ".txt"),
        ("suffixes", ["txt"]),
        ("max_file_bytes", 0),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(corpus: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} = .*allowed"):
        load(corpus, **{option: value})


@pytest.mark.parametrize("place", ["", 3, None])
def test_a_place_that_is_no_path_is_refused(place: object) -> None:
    with pytest.raises(ConfigError, match="data_dir = .*allowed is the path"):
        text_source(place, max_seq_len=40)  # type: ignore[arg-type]


def test_evaluation_of_raw_text_needs_the_vocabulary_of_training(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_path=loader.source.vocabulary_file"):
        load(corpus, train=False)


def bad_folder(folder: Path, name: str, content: bytes) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("one two three four five six seven\n" * 20)
    (folder / "data" / name).write_bytes(content)
    return folder


def test_a_binary_file_is_refused_by_name_and_line_and_endings_leave_it_out(tmp_path: Path) -> None:
    bad_folder(tmp_path, "b.bin", b"text\nmore\n\0\1\2\n")
    with pytest.raises(DataError, match=r"data/b.bin, line 3: a NUL byte, so it is not text. .*suffixes="):
        load(tmp_path)
    assert len(load(tmp_path, suffixes=(".txt",))) > 1
    (tmp_path / "data" / "b.bin").write_bytes(b"text\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"data/b.bin, line 2: byte 0xff is not UTF-8"):
        load(tmp_path)


def test_links_that_lead_out_pipes_and_missing_folders_are_refused(tmp_path: Path) -> None:
    bad_folder(tmp_path, "b.txt", b"one two\n")
    os.mkfifo(tmp_path / "data" / "pipe")
    with pytest.raises(DataError, match="data/pipe: not a regular file"):
        load(tmp_path)
    (tmp_path / "data" / "pipe").unlink()
    for target in ("/etc/passwd", "/etc"):
        (tmp_path / "data" / "link").symlink_to(target)
        with pytest.raises(DataError, match="data/link: a link that leads out of"):
            load(tmp_path)
        (tmp_path / "data" / "link").unlink()
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        text_source(tmp_path / "nowhere", max_seq_len=40, cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="no text files with the endings .md"):
        load(tmp_path, suffixes=(".md",))


def test_hidden_files_the_vocabulary_and_links_inside_are_left_alone(tmp_path: Path) -> None:
    bad_folder(tmp_path, ".hidden", b"\0")
    (tmp_path / "data" / ".git").mkdir()
    (tmp_path / "data" / ".git" / "index").write_bytes(b"\0")
    (tmp_path / "data" / "again.txt").symlink_to("a.txt")
    source = load(tmp_path)
    (tmp_path / "data" / "vocab.txt").write_bytes(source.vocabulary_file.read_bytes())
    again = load(tmp_path, vocab_path=tmp_path / "data" / "vocab.txt")
    assert len(again) == len(source)
    np.testing.assert_array_equal(again.pairs.tokens, source.pairs.tokens)


def test_empty_files_are_counted_in_a_warning_and_only_empty_files_are_an_error(tmp_path: Path) -> None:
    bad_folder(tmp_path, "b.txt", b"")
    with pytest.warns(FleetWarning, match="1 of 2 documents hold no two tokens"):
        load(tmp_path)
    (tmp_path / "data" / "a.txt").write_text("")
    with pytest.raises(DataError, match="a.txt, line 1: the file is empty, and so are the other 1"):
        load(tmp_path)
    (tmp_path / "data" / "a.txt").write_text(" \n\n")
    with pytest.raises(DataError, match="no text"):
        load(tmp_path)


def test_a_vocabulary_of_another_script_is_said_aloud(tmp_path: Path) -> None:
    bad_folder(tmp_path, "b.txt", "один два три\n".encode() * 30)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]) + "\n")
    with pytest.warns(FleetWarning, match=r"\d\d% of the tokens are \[UNK\]"):
        load(tmp_path, vocab_path=tmp_path / "vocab.txt")


# --- on several ranks


def _load_on_rank(rank: int, folder: str) -> tuple[str, str]:
    source = text_source(f"{folder}/data", max_seq_len=40, vocab_size=200, cache_dir=f"{folder}/cache")
    return source.digest, source.vocabulary.digest


def _fail_on_rank(rank: int, folder: str) -> str:
    return raised(lambda: _load_on_rank(rank, folder))


def test_ranks_that_load_at_once_get_the_same_corpus_and_leave_one_copy(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "data", tmp_path / "data")
    first, second = run_ranks(_load_on_rank, 2, str(tmp_path))
    assert first == second
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2  # vocabulary and tokens


def test_a_bad_file_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    bad_folder(tmp_path, "b.txt", b"one\n\0\n")
    first, second = run_ranks(_fail_on_rank, 2, str(tmp_path))
    assert first == second and "data/b.txt, line 2: a NUL byte" in first


# --- the standard library


def test_the_standard_library_is_split_by_name_and_holds_no_tests() -> None:
    train, test = ({file.name for file in stdlib_files(train=flag)} for flag in (True, False))
    assert not train & test and "stdlib/json/decoder.py" in train | test
    assert 0.05 < len(test) / len(train | test) < 0.2
    assert all(is_test_file(name.removeprefix("stdlib/")) for name in test)
    assert not any("/test/" in name or "idlelib" in name or "site-packages" in name for name in train | test)
    small = stdlib_files(train=True, max_bytes=300_000)
    assert 0 < sum(file.size for file in small) <= 300_000 and [file.name for file in small] == sorted(
        file.name for file in small
    )


def test_the_standard_library_trains_a_vocabulary_that_evaluation_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no folder of that name here
    options = {"max_seq_len": 64, "vocab_size": 1000, "cache_dir": tmp_path / "cache", "stdlib_bytes": 200_000}
    train = text_source("stdlib", **options)  # type: ignore[arg-type]
    test = text_source("stdlib", train=False, **options)  # type: ignore[arg-type]
    assert train.vocabulary == test.vocabulary and train.vocab_size == 1000
    assert len(train) > 500 and len(test) > 10


# --- how it travels


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_a_batch_travels_in_few_bytes_and_comes_out_wide(dtype: type) -> None:
    ids = np.array([[2, 5, 3, 6, 3], [2, 7, 8, 3, 0]], dtype=dtype)
    small = compact(
        ids,
        np.array([1, 3, 6]),
        np.array([9, 6, 30000], dtype=dtype),
        splits=np.array([3, 4]),
        lengths=np.array([5, 4]),
        follows=np.array([True, False]),
    )
    travels = sum(value.nbytes for value in small if isinstance(value, torch.Tensor))
    assert travels == 4 * (3 + 2 + 2) + np.dtype(dtype).itemsize * (10 + 3) + 2
    found = tensors(widened(small))
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": ids.tolist(),
        "token_type_ids": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
        "attention_mask": [[True] * 5, [True] * 4 + [False]],
        "mlm_positions": [1, 3, 6],
        "mlm_labels": [9, 6, 30000],
        "next_sentence_label": [0, 1],
    }
    assert all(value.dtype == (torch.bool if name == "attention_mask" else torch.int64) for name, value in found.items())


def test_a_folder_of_splits_in_folders_trains_and_evaluates_on_its_own_split_alone(tmp_path):
    for split, word in {"train": "apple", "test": "berry"}.items():
        (tmp_path / split).mkdir()
        for number in range(4):
            text = "".join(f"{word} number {number} of line {line}\n" for line in range(8))
            (tmp_path / split / f"{number}.txt").write_text(text)
    train = text_source(tmp_path, max_seq_len=16, cache_dir=tmp_path / "cache")
    words = set(train.vocabulary_file.read_text().split())
    assert "apple" in words and "berry" not in words
    test = text_source(tmp_path, train.vocabulary_file, max_seq_len=16, cache_dir=tmp_path / "cache", train=False)
    apple = train.vocabulary.ids["apple"]
    assert (np.asarray(train.pairs.tokens) == apple).any() and not (np.asarray(test.pairs.tokens) == apple).any()
