"""Sentence pairs and planned batches."""

from __future__ import annotations

import numpy as np
import pytest

from fleetx.data.text.pairs import DocumentPairs, cut_documents
from fleetx.data.text.text_source import padded_width, plan_batches
from fleetx.errors import DataError


def corpus(sizes: list[int], sentence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents of these sizes; each token is 1000 * document + place; sentences of equal length."""
    tokens = np.concatenate([1000 * number + np.arange(size) for number, size in enumerate(sizes)])
    document_ends = np.cumsum(sizes)
    starts = document_ends - sizes
    ends = [
        min(start + k, end)
        for start, end in zip(starts, document_ends, strict=True)
        for k in range(sentence, end - start + sentence, sentence)
    ]
    return tokens, np.array(ends), document_ends


def test_documents_are_cut_into_full_pieces_and_the_last_one_reaches_back() -> None:
    starts, sizes, documents = cut_documents(np.array([25, 25, 32, 33]), 10)  # 25, 0, 7 and 1 tokens
    assert starts.tolist() == [0, 10, 15, 25]
    assert sizes.tolist() == [10, 10, 10, 7]
    assert documents.tolist() == [0, 0, 0, 2]  # an empty one and one of a single token make no pair


@pytest.mark.parametrize("sizes, sentence", [([200, 150, 90], 7), ([200, 150, 90], 500), ([60, 3, 400, 2], 1)])
def test_a_pair_is_two_neighbouring_parts_or_parts_of_two_documents(sizes: list[int], sentence: int) -> None:
    tokens, bounds, documents = corpus(sizes, sentence)
    pairs = DocumentPairs(tokens, bounds, documents, max_seq_len=33, name="corpus")
    indices = np.arange(len(pairs.lengths))
    following = 0
    for epoch in range(20):
        spans = pairs.spans(0, epoch, indices)
        for a, a_length, b, b_length, follows, length in zip(
            spans.a_start, spans.a_length, spans.b_start, spans.b_length, spans.follows, pairs.lengths, strict=True
        ):
            assert a_length >= 1 and b_length >= 1 and a_length + b_length + 3 <= length <= 33
            one, two = tokens[a : a + a_length] // 1000, tokens[b : b + b_length] // 1000
            assert len(set(one)) == len(set(two)) == 1
            assert (b == a + a_length and a_length + b_length + 3 == length) if follows else one[0] != two[0]
        following += int(spans.follows.sum())
    total = 20 * len(indices)
    assert abs(following - total / 2) < 5 * np.sqrt(total) / 2


def test_a_ends_at_a_sentence_and_each_end_is_equally_likely() -> None:
    tokens, bounds, documents = corpus([40, 40], 10)
    pairs = DocumentPairs(tokens, bounds, documents, max_seq_len=43, name="corpus")
    ends = np.concatenate([pairs.spans(3, epoch, np.array([0, 1])).a_length for epoch in range(600)])
    counts = dict(zip(*np.unique(ends, return_counts=True), strict=True))
    assert set(counts) == {10, 20, 30}
    assert all(abs(count - 400) < 5 * np.sqrt(400) for count in counts.values())


def test_every_piece_of_other_documents_can_be_the_other_b_and_none_of_the_own() -> None:
    tokens, bounds, documents = corpus([30, 90, 30], 10)
    pairs = DocumentPairs(tokens, bounds, documents, max_seq_len=33, name="corpus")
    seen = set()
    for epoch in range(300):
        spans = pairs.spans(0, epoch, np.array([1]))  # the first piece of document 1
        if not spans.follows[0]:
            seen.add(int(tokens[spans.b_start[0]]) // 1000)
    assert seen == {0, 2}


def test_one_document_alone_gets_other_places_of_its_own() -> None:
    tokens, bounds, documents = corpus([300], 10)
    pairs = DocumentPairs(tokens, bounds, documents, max_seq_len=33, name="corpus")
    spans = pairs.spans(0, 0, np.arange(len(pairs.lengths)))
    assert 0 < spans.follows.sum() < len(pairs.lengths)


def test_a_text_too_small_for_pairs_is_an_error() -> None:
    tokens, bounds, documents = corpus([20], 10)
    with pytest.raises(DataError, match="corpus: too little text, 20 tokens"):
        DocumentPairs(tokens, bounds, documents, max_seq_len=33, name="corpus")


def test_a_pair_does_not_depend_on_its_company_and_differs_between_epochs_and_seeds() -> None:
    tokens, bounds, documents = corpus([500, 500], 7)
    pairs = DocumentPairs(tokens, bounds, documents, max_seq_len=33, name="corpus")
    indices = np.arange(len(pairs.lengths))
    together = pairs.spans(1, 2, indices)
    for index in indices[::-1]:
        alone = pairs.spans(1, 2, np.array([index]))
        assert (alone.a_start[0], alone.a_length[0], alone.b_start[0], alone.b_length[0]) == (
            together.a_start[index],
            together.a_length[index],
            together.b_start[index],
            together.b_length[index],
        )
    for other in (pairs.spans(1, 3, indices), pairs.spans(2, 2, indices)):
        assert (other.b_start != together.b_start).any() and (other.a_length != together.a_length).any()


def test_widths_are_multiples_of_eight_up_to_the_longest_allowed() -> None:
    assert [padded_width(longest, 30) for longest in (1, 8, 9, 24, 25, 30)] == [8, 8, 16, 24, 30, 30]


def test_planned_batches_hold_every_sample_once_and_no_more_tokens_than_allowed() -> None:
    lengths = np.random.default_rng(0).integers(5, 65, 1000)
    plan = plan_batches(lengths, tokens=256, max_seq_len=64, seed=3)
    assert sorted(np.concatenate(plan).tolist()) == list(range(1000))
    for batch in plan:
        assert len(batch) * padded_width(int(lengths[batch].max()), 64) <= 256
    padded = sum(len(batch) * padded_width(int(lengths[batch].max()), 64) for batch in plan)
    assert lengths.sum() / padded > 0.85  # the rest is padding


def test_samples_of_equal_length_are_grouped_by_the_seed() -> None:
    lengths = np.full(40, 16)
    plans = [plan_batches(lengths, tokens=64, max_seq_len=16, seed=seed) for seed in (0, 0, 1)]
    assert [batch.tolist() for batch in plans[0]] == [batch.tolist() for batch in plans[1]]
    assert [batch.tolist() for batch in plans[0]] != [batch.tolist() for batch in plans[2]]
    assert {len(batch) for batch in plans[0]} == {4}
