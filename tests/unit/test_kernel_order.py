"""What the launches of LARS and LAMB work on, for any model: every chunk once; and the table they read, sent when it changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.optim.kernels import common
from fleetx.optim.kernels.order import MOST_GROUPS, Item, Kind, Work, chunks_of, work_items
from fleetx.optim.kernels.plan import COLUMN, Plan, Table, Tensors, Tuning

CPU = torch.device("cpu")
TENSOR = st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 3))
"""Chunks, adapted, group."""
MODELS = st.lists(TENSOR, max_size=12)
Model = list[tuple[int, bool, int]]


def items_of(model: Model, *, measured: bool = False) -> Work:
    chunks, adapted, groups = ([tensor[i] for tensor in model] for i in range(3))
    return work_items(chunks, adapted, groups, measured=measured)  # type: ignore[arg-type]


def all_chunks(model: Model) -> list[tuple[int, int]]:
    return [(tensor, chunk) for tensor, (count, _, _) in enumerate(model) for chunk in range(count)]


def places(items: list[Item]) -> Counter[tuple[int, int]]:
    return Counter((item.tensor, item.chunk) for item in items)


# --- items ----------------------------------------------------------------------------------------------------------------


@given(model=MODELS, measured=st.booleans())
def test_every_chunk_of_every_tensor_is_updated_exactly_once(model: Model, measured: bool) -> None:
    work = items_of(model, measured=measured)
    assert places([*work.at_once, *work.apply]) == Counter(all_chunks(model))


@given(model=MODELS)
def test_a_chunk_is_measured_once_if_its_tensor_is_adapted_and_has_several(model: Model) -> None:
    work = items_of(model)
    several = [(tensor, chunk) for tensor, chunk in all_chunks(model) if model[tensor][1] and model[tensor][0] > 1]
    assert places(work.measure) == places(work.apply) == Counter(several)


@given(model=MODELS)
def test_nothing_is_measured_when_all_norms_are_known(model: Model) -> None:
    work = items_of(model, measured=True)
    assert work.measure == [] and {item.kind for item in work.at_once} <= {Kind.DIRECT}
    assert places(work.apply) == Counter((tensor, chunk) for tensor, chunk in all_chunks(model) if model[tensor][1])


@given(model=MODELS, measured=st.booleans())
def test_an_item_names_its_tensors_group_and_the_kind_of_its_list(model: Model, measured: bool) -> None:
    work = items_of(model, measured=measured)
    for item in [*work.at_once, *work.measure, *work.apply]:
        assert item.group == model[item.tensor][2]
    assert {item.kind for item in work.measure} <= {Kind.MEASURE} and {item.kind for item in work.apply} <= {Kind.APPLY}
    for item in work.at_once:
        assert item.kind == (Kind.WHOLE if model[item.tensor][1] else Kind.DIRECT)


def test_what_was_measured_last_is_applied_first() -> None:
    work = items_of([(2, True, 0), (1, True, 0), (2, False, 1), (2, True, 1)])
    assert [(item.tensor, item.chunk) for item in work.measure] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert [(item.tensor, item.chunk) for item in work.apply] == [(3, 1), (3, 0), (0, 1), (0, 0)]
    assert work.at_once == [Item(Kind.WHOLE, 0, 1, 0), Item(Kind.DIRECT, 1, 2, 0), Item(Kind.DIRECT, 1, 2, 1)]


@pytest.mark.parametrize(("numel", "chunks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_the_last_chunk_may_be_partly_filled(numel: int, chunks: int) -> None:
    assert chunks_of(numel, 256) == chunks


# --- words ----------------------------------------------------------------------------------------------------------------


def value(constant: Any) -> int:
    return int(getattr(constant, "value", constant))


def unpacked(word: int) -> Item:
    """With the kernels' own constants."""
    kind, group, tensor = (word >> value(shift) for shift in (common.KIND_SHIFT, common.GROUP_SHIFT, common.TENSOR_SHIFT))
    masks = value(common.GROUP_MASK), value(common.TENSOR_MASK), value(common.CHUNK_MASK)
    return Item(Kind(kind), group & masks[0], tensor & masks[1], word & masks[2])


@given(st.sampled_from(Kind), st.integers(0, MOST_GROUPS - 1), st.integers(0, 2**20 - 1), st.integers(0, 2**28 - 1))
def test_a_word_unpacks_to_its_item(kind: Kind, group: int, tensor: int, chunk: int) -> None:
    item = Item(kind, group, tensor, chunk)
    assert unpacked(item.word()) == item and item.word() < 2**63


def test_kernels_and_host_number_the_kinds_alike() -> None:
    assert {kind.name: value(getattr(common, kind.name)) for kind in Kind} == {kind.name: kind.value for kind in Kind}


def test_kernels_and_host_number_the_columns_alike() -> None:
    names = {"param": "PARAM", "grad": "GRAD", "first": "FIRST", "second": "SECOND", "master": "MASTER", "step": "STEP"}
    names |= {name: name.upper() for name in ("grad_norm", "numel", "first_chunk", "chunks", "decayed")}
    assert {name: value(getattr(common, constant)) for name, constant in names.items()} == COLUMN
    assert len(COLUMN) == common.ROW_WORDS


# --- a plan ---------------------------------------------------------------------------------------------------------------


def plan_of(model: Model, numels: list[int]) -> Plan:
    adapted, groups = [tensor[1] for tensor in model], [tensor[2] for tensor in model]
    tensors = Tensors(numels=numels, adapted=adapted, decayed=adapted[::-1], groups=groups)
    names = [f"{i}" if is_adapted else None for i, is_adapted in enumerate(adapted)]
    return Plan(tensors, names=names, n_groups=4, device=CPU, tuning=Tuning(chunk_elements=8))


@settings(max_examples=40)
@given(model=st.lists(TENSOR, min_size=1, max_size=8), rest=st.integers(1, 8), measured=st.booleans())
def test_a_plans_lists_are_the_words_of_its_items(model: Model, rest: int, measured: bool) -> None:
    plan = plan_of(model, [max(0, 8 * (count - 1) + rest) if count else 0 for count, _, _ in model])
    lists, work = plan.lists(measured=measured), items_of(model, measured=measured)
    found = [[unpacked(word) for word in words.tolist()] for words in lists]
    assert found == [work.measure, work.apply, work.at_once + work.measure, work.at_once + work.apply]
    assert plan.lists(measured=measured) is lists


def rows_of(table: torch.Tensor, plan: Plan) -> torch.Tensor:
    return table[: plan.n_tensors * common.ROW_WORDS].view(plan.n_tensors, common.ROW_WORDS)


def test_the_table_holds_addresses_sizes_and_below_them_settings() -> None:
    plan = plan_of([(2, True, 0), (0, True, 1), (1, False, 3)], [9, 0, 8])
    table = plan.send({"param": [16, 32, 48], "grad": [64, 80, 96]}, [[0.5 * i, 0.25] for i in range(4)])
    columns = {name: rows_of(table, plan)[:, i].tolist() for name, i in COLUMN.items()}
    assert columns["param"] == [16, 32, 48] and columns["grad"] == [64, 80, 96] and columns["master"] == [0, 0, 0]
    assert columns["numel"] == [9, 0, 8] and columns["chunks"] == [2, 0, 1] and columns["first_chunk"] == [0, 2, 2]
    assert columns["decayed"] == [0, 1, 1]
    for group in range(4):
        place = plan.place_of_lr(group)
        assert table[place : place + 2].view(torch.float64).tolist() == [0.5 * group, 0.25]
    assert [(word >> 32, word & 0xFFFFFFFF) for word in plan.all_tensors.tolist()] == [(0, 0), (1, 1), (3, 2)]
    assert [(word >> 32, word & 0xFFFFFFFF) for word in plan.adapted.tolist()] == [(0, 0), (1, 1)]


def test_a_plan_sends_its_table_when_an_address_or_a_setting_is_another() -> None:
    """What is on the device is overwritten here, so that a table that is sent shows."""
    plan, settings_of = plan_of([(1, True, 0)], [8]), [[0.1, 0.9]] * 4
    table = plan.send({"param": [16], "grad": [32]}, settings_of)

    def is_sent(grad: int, rates: list[list[float]]) -> bool:
        table.zero_()
        assert plan.send({"param": [16], "grad": [grad]}, rates) is table
        return bool(table.any())

    assert not is_sent(32, settings_of) and not is_sent(32, [[0.1, 0.9]] * 4)
    assert is_sent(48, settings_of) and not is_sent(48, settings_of)
    assert is_sent(48, [[0.2, 0.9]] * 4) and not is_sent(48, [[0.2, 0.9]] * 4)
    assert is_sent(32, settings_of)
    assert rows_of(table, plan)[0, COLUMN["grad"]] == 32 and plan.place_of_lr(0) == common.ROW_WORDS


@pytest.mark.parametrize(("grads", "aligned"), [([32, 48], True), ([32, 36], False), ([4, 48], False), ([0, 16], True)])
def test_gradients_are_aligned_when_all_begin_at_multiples_of_16_bytes(grads: list[int], aligned: bool) -> None:
    plan = plan_of([(1, True, 0), (1, True, 0)], [8, 8])
    for addresses, expected in (([16, 32], True), (grads, aligned), ([8, 32], False)):
        plan.send({"param": [16, 32], "grad": addresses}, [[0.1]] * 4)
        assert plan.is_aligned == expected


def test_a_table_sends_what_has_changed_and_nothing_else() -> None:
    table = Table(3, CPU)
    table.words[:] = [1, 2, 3]
    assert table.on_device(changed=True).tolist() == [1, 2, 3]
    table.words[1] = 7
    assert table.on_device(changed=False).tolist() == [1, 2, 3]
    live = table.on_device(changed=True)
    assert live.tolist() == [1, 7, 3]
    table.words[:] = np.arange(3)
    assert live.tolist() == [1, 7, 3]
