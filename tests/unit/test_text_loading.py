"""BERT's own loaders: Fleet's lines, raw text, Python's sources; in sequences or in tokens; training and evaluating on them."""

import gzip
import random

import pytest
import torch

import fleetx as X
from fleetx import fleet
from fleetx.errors import ConfigError, DataError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TINY = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "max_position": 32}


@pytest.fixture
def digital(tmp_path):
    """Forty lines of Fleet's numbers, 8 to 20 tokens long, half of the pairs true; `vocab.txt` has 64 tokens."""
    folder, rng = tmp_path / "train_data", random.Random(0)
    folder.mkdir()
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in SPECIAL + [f"w{i}" for i in range(59)]))
    lines = []
    for number in range(40):
        first, second = ([rng.randrange(5, 64) for _ in range(rng.randint(3, 8))] for _ in range(2))
        tokens = [2, *first, 3, *second, 3]
        sentences = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        fields = (tokens, sentences, range(len(tokens)))
        lines.append(";".join([*(" ".join(map(str, f)) for f in fields), str(number % 2)]) + "\n")
    with gzip.open(folder / "part-0.gz", "wt") as file:
        file.write("".join(lines))
    return folder


def tiny(**options):
    torch.manual_seed(0)
    return X.applications.Bert_base(**(TINY | {"vocab_size": 64} | options)).to(fleet.device())


def test_the_seeds_call_gives_batches_that_the_loss_takes(digital, tmp_path):
    model = tiny()
    loader = model.load_digital_dataset_from_file(
        data_dir=digital, vocab_path=digital.parent / "vocab.txt", max_seq_len=32, batch_size=8, workers=0, cache_dir=tmp_path
    )
    batches = list(loader)
    assert len(batches) == len(loader) == 5
    assert all(batch["input_ids"].dtype == torch.int64 and len(batch["input_ids"]) == 8 for batch in batches)
    model.loss(batches[0]).backward()
    assert model.bert.pooler.dense.weight.grad is not None


def test_in_tokens_counts_tokens_and_reads_every_line_once(digital, tmp_path):
    model = tiny()
    loader = model.load_digital_dataset_from_file(
        digital, digital.parent / "vocab.txt", 32, 128, in_tokens=True, workers=0, cache_dir=tmp_path
    )
    batches = list(loader)
    assert all(batch["input_ids"].numel() <= 128 for batch in batches)
    assert sum(len(batch["input_ids"]) for batch in batches) == 40
    with pytest.raises(ConfigError, match="in_tokens"):
        model.load_digital_dataset_from_file(digital, digital.parent / "vocab.txt", 32, 31, in_tokens=True, cache_dir=tmp_path)


def test_the_number_of_workers_does_not_change_a_bit(digital, tmp_path):
    model, vocabulary = tiny(), digital.parent / "vocab.txt"
    runs = [
        list(model.get_train_dataloader(digital, 8, vocab_path=vocabulary, workers=workers, cache_dir=tmp_path))
        for workers in (0, 2)
    ]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_raw_text_trains_a_vocabulary_and_evaluation_uses_the_same(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        for number in range(3):
            text = "\n".join(f"the {word} number {number} is a small word of the {name} file" for word in "abcdefgh")
            (tmp_path / name / f"{number}.txt").write_text(text)
    model = tiny(vocab_size=200)
    options = {"max_seq_len": 32, "workers": 0, "cache_dir": tmp_path / "cache"}
    train = model.get_train_dataloader(tmp_path / "train", 2, **options)
    val = model.get_val_dataloader(tmp_path / "val", 2, **options)
    assert model.vocabulary_file == train.source.vocabulary_file == val.source.vocabulary_file
    assert train.source.vocab_size == val.source.vocab_size <= 200
    with pytest.raises(ConfigError, match="evaluation needs the vocabulary of training"):
        tiny(vocab_size=200).get_val_dataloader(tmp_path / "val", 2, **options)
    first, again = list(val), list(val)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(list(train), list(train), strict=True))
    scores = X.applications.evaluate(model, val)
    assert scores["pairs"] == len(val.source) and 0 <= scores["mlm_acc"] <= 1 and scores["loss"] > 0


def test_evaluation_with_another_vocabulary_than_that_of_training_is_refused(digital, tmp_path):
    model, options = tiny(), {"workers": 0, "cache_dir": tmp_path / "cache"}
    vocabulary, own = digital.parent / "vocab.txt", digital / "vocab.txt"
    model.load_digital_dataset_from_file(digital, vocabulary, batch_size=8, **options)
    assert model.get_val_dataloader(digital, 8, **options).source.vocabulary_file == vocabulary
    own.write_text(vocabulary.read_text())
    assert model.get_val_dataloader(digital, 8, **options).source.vocabulary_file == own
    own.write_text(vocabulary.read_text().replace("w58", "other"))
    with pytest.raises(ConfigError, match=r"train_data/vocab.txt is another vocabulary than .*/vocab.txt, .* vocab_path="):
        model.get_val_dataloader(digital, 8, **options)


def test_what_does_not_fit_the_model_is_said_with_the_line_to_write(digital, tmp_path):
    vocabulary = digital.parent / "vocab.txt"
    with pytest.raises(ConfigError, match="the vocabulary has 64 tokens, the model 60. Build it with vocab_size=64."):
        tiny(vocab_size=60).get_train_dataloader(digital, 8, vocab_path=vocabulary, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="max_seq_len is 64; it must be an integer of at least 5 and at most 32"):
        tiny().load_digital_dataset_from_file(digital, vocabulary, 64, 8, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no option `worker`. Did you mean `workers`\?"):
        tiny().get_train_dataloader(digital, 8, vocab_path=vocabulary, worker=1)
    with pytest.raises(DataError, match="nothing-here"):
        tiny().get_train_dataloader(tmp_path / "nothing-here", 8, vocab_path=vocabulary, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"'stdlob': there is no such file or folder. Did you mean `stdlib`\?"):
        tiny().get_train_dataloader("stdlob", 8)
    with pytest.raises(ConfigError, match='data is None; it must be a folder of text, or a data set, or "stdlib"'):
        tiny().get_train_dataloader(None, 8)
    with pytest.raises(ConfigError, match="drop_last=True with in_tokens=True"):
        tiny().load_digital_dataset_from_file(digital, vocabulary, 32, 64, True, drop_last=True, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="drop_last is 1; it must be True or False"):
        tiny().load_digital_dataset_from_file(digital, vocabulary, 32, 8, drop_last=1, cache_dir=tmp_path)
