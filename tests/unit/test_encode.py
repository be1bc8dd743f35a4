"""Any state as JSON plus tensors, and back: the same types, the same bits, or a refusal that says where."""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fleetx.checkpoint.encode import Encoder, decode
from fleetx.checkpoint.snapshot import without_aliases
from fleetx.dist.fingerprint import bytes_of
from fleetx.errors import CheckpointError

properties = settings(deadline=None, max_examples=200)


def round_trip(value: Any) -> Any:
    """Through the text and the bytes that a checkpoint consists of."""
    encoder = Encoder()
    words = json.dumps(encoder.encode(value, "value"), allow_nan=False)
    return decode(json.loads(words), written_and_read(encoder.tensors).__getitem__)


def written_and_read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        save_file(without_aliases(tensors), f"{folder}/x")
        with safe_open(f"{folder}/x", framework="pt") as stored:
            return {key: stored.get_tensor(key).clone() for key in stored.keys()}


def same(ours: Any, theirs: Any) -> bool:
    """Equal in type and in bits: 0.0 is not -0.0, and nan is nan."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bits(ours) == bits(theirs)
    if isinstance(ours, np.ndarray | np.generic):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, float):
        return (math.isnan(ours) and math.isnan(theirs)) or struct.pack("d", ours) == struct.pack("d", theirs)
    if isinstance(ours, complex):
        return same([ours.real, ours.imag], [theirs.real, theirs.imag])
    if isinstance(ours, dict):
        pairs = zip(ours.items(), theirs.items(), strict=True) if len(ours) == len(theirs) else [((0, 0), (1, 0))]
        return all(same(k, other_k) and same(v, other_v) for (k, v), (other_k, other_v) in pairs)
    if isinstance(ours, set | frozenset):
        return same(sorted(ours, key=repr), sorted(theirs, key=repr))
    if isinstance(ours, list | tuple | deque):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def bits(tensor: Tensor) -> bytes:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return bytes_of(real).numpy().tobytes()


def test_the_comparison_of_these_tests_tells_types_and_bits_apart() -> None:
    assert same([0.0, float("nan"), {1: (2,)}], [0.0, float("nan"), {1: (2,)}])
    for ours, theirs in [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ((1,), [1]),
        ({1: 2}, {"1": 2}),
        ({1: 2}, {}),
        (torch.zeros(1), -torch.zeros(1)),
        (np.float32(1), np.float64(1)),
        ([1], [1, 2]),
    ]:
        assert not same(ours, theirs)


# --- plain values -------------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3])])
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.text().map(lambda text: "$" + text)
keys = keys | st.tuples(keys, keys)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(keys, children, max_size=4)
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.lists(children, max_size=4).map(deque)
        | pairs
        | pairs.map(OrderedDict)
        | pairs.map(lambda found: defaultdict(list, found))
        | st.frozensets(keys, max_size=4)
        | st.sets(keys, max_size=4)
    )


@properties
@given(st.recursive(scalars, containers, max_leaves=12))
def test_a_nested_tree_of_values_comes_back_with_its_types_and_bits(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_a_float_comes_back_to_the_bit(value: float) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"lr": [value]}), {"lr": [value]})


@pytest.mark.parametrize("value", [2**63, -(2**64), 2**2048, -(2**2049) + 1, 10**5000], ids=int.bit_length)
def test_a_whole_number_of_any_length_comes_back(value: int) -> None:
    assert same(round_trip(value), value)


def test_the_milestones_of_a_scheduler_come_back_as_a_counter_of_whole_numbers() -> None:
    assert same(round_trip(Counter({30: 1, 60: 2})), Counter({30: 1, 60: 2}))


def test_the_order_of_a_dict_is_kept() -> None:
    assert list(round_trip({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


@pytest.mark.parametrize("key", ["$", "$tensor", "$dict", "$float", "$$"])
def test_a_key_that_begins_with_a_dollar_is_a_key(key: str) -> None:
    for value in ({key: "x"}, {key: [1]}, {key: 1, "b": 2}, {"a": {key: {key: None}}}):
        assert same(round_trip(value), value)


def test_a_deque_keeps_its_greatest_length() -> None:
    losses = round_trip(deque([1.0, 2.0, 3.0], maxlen=3))
    losses.append(4.0)
    assert list(losses) == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("factory", [int, float, str, list, dict, set, None])
def test_a_defaultdict_keeps_its_default(factory: Any) -> None:
    found = round_trip(defaultdict(factory, {"seen": 1}))
    assert type(found) is defaultdict and found == {"seen": 1}
    assert found.default_factory is factory


def test_a_read_only_mapping_comes_back_as_a_dict() -> None:
    assert same(round_trip(MappingProxyType({"a": 1})), {"a": 1})


def test_what_was_saved_does_not_change_with_the_value() -> None:
    value = {"losses": [1.0], "inner": {"n": 1}}
    encoded = Encoder().encode(value, "value")
    value["losses"].append(2.0)  # type: ignore[attr-defined]
    value["inner"]["n"] = 2  # type: ignore[index]
    assert decode(encoded, {}.__getitem__) == {"losses": [1.0], "inner": {"n": 1}}


# --- numpy --------------------------------------------------------------------------------------------------------------

NUMPY_TYPES = ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "longdouble"]
NUMPY_TYPES += ["complex64", "complex128"]


@pytest.mark.parametrize("dtype", [*NUMPY_TYPES, ">f4", "<i2"])
def test_a_numpy_array_comes_back_with_its_type_and_bits(dtype: str) -> None:
    whole = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for array in (whole, whole[:, ::2], whole.T, np.asfortranarray(whole), whole[:0], whole[0, 0, 0].reshape(())):
        assert same(round_trip(array), array)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_a_numpy_scalar_comes_back_as_one(dtype: str) -> None:
    value = np.array([3]).astype(dtype)[0]
    assert same(round_trip(value), value)
    assert same(round_trip({value: value}), {value: value})


def test_a_numpy_array_can_be_written_to_after_it_came_back() -> None:
    array = round_trip(np.zeros(3))
    array += 1
    assert array.tolist() == [1, 1, 1]


def test_the_states_of_all_random_generators_come_back() -> None:
    for bit_generator in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        state = np.random.Generator(bit_generator(3)).bit_generator.state
        assert same(round_trip(state), state)
    for state in (random.Random(3).getstate(), np.random.get_state(), torch.Generator().manual_seed(3).get_state()):
        assert same(round_trip(state), state)


# --- tensors ------------------------------------------------------------------------------------------------------------

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.uint16]
TENSOR_TYPES = [*NARROW, *REAL, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.complex64, torch.complex128]


def noise(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all: nan, infinities, subnormals and both zeros among them."""
    size = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    return torch.frombuffer(bytearray(random.Random(5).randbytes(size)), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", TENSOR_TYPES, ids=str)
def test_a_tensor_of_any_type_and_shape_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    whole = noise(dtype, 4, 6, 2)
    for tensor in (whole, whole.transpose(0, 1), whole[1:3, ::2], whole[0, 0, 0], whole[:0], whole[0, 0, 0].expand(3, 2)):
        assert same(round_trip(tensor), tensor.detach())


def test_a_tensor_of_truth_values_comes_back() -> None:
    mask = torch.tensor([True, False, True])
    assert same(round_trip({"mask": mask, "none": mask[:0]}), {"mask": mask, "none": mask[:0]})


def test_a_channels_last_tensor_comes_back_in_logical_order() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert same(round_trip(image), image.contiguous())


def test_signed_zeros_infinities_and_the_payload_of_a_nan_survive_in_a_tensor() -> None:
    words = [0x80000000, 0x7F800000, 0xFF800000, 0x7FC01234, 0xFFC01234, 1]
    tensor = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32))
    assert bits(round_trip(tensor)) == bits(tensor)


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    found = round_trip(torch.nn.Parameter(torch.ones(2)))
    assert same(found, torch.ones(2)) and not found.requires_grad


def test_tied_tensors_are_stored_once() -> None:
    weight = torch.arange(6.0)
    encoder = Encoder()
    encoded = encoder.encode({"embedding": weight, "head": weight.view(6)}, "model")
    assert list(encoder.tensors) == ["model/embedding"]
    assert encoded["embedding"] == encoded["head"]


def test_views_that_overlap_come_back_each_with_its_own_values() -> None:
    flat = torch.arange(6.0)
    views = {"all": flat, "head": flat[:3], "square": flat.view(2, 3), "transposed": flat.view(2, 3).t(), "tail": flat[2:]}
    assert same(round_trip(views), views)


def test_a_conjugate_and_a_negated_view_are_not_taken_for_the_tensor_they_view() -> None:
    z = torch.tensor([1 + 2j])
    found = round_trip({"z": z, "conjugate": z.conj(), "imaginary": z.imag, "negated": z.conj().imag})
    assert found["z"].tolist() == [1 + 2j] and found["conjugate"].tolist() == [1 - 2j]
    assert found["imaginary"].tolist() == [2] and found["negated"].tolist() == [-2]


def test_one_element_of_a_column_comes_back_and_its_bytes_can_be_viewed() -> None:
    column, z = torch.arange(5.0).view(1, 5)[:, 3], torch.tensor([1 + 2j, 3 + 4j])[1:].imag
    encoder = Encoder()
    encoder.encode({"column": column, "imaginary": z}, "value")
    assert [bits(tensor) for tensor in encoder.tensors.values()] == [struct.pack("f", 3.0), struct.pack("f", 4.0)]
    assert same(round_trip(column), torch.tensor([3.0]))


def test_two_tensors_whose_paths_read_alike_are_two_tensors() -> None:
    one, two, three, four = (torch.tensor([n]) for n in (1.0, 2.0, 3.0, 4.0))
    value = {"a": {"b": one}, "a/b": two, 1: three, "1": four, "1#2": torch.tensor([5.0])}
    assert same(round_trip(value), value)


def test_names_that_safetensors_does_not_take_are_only_names() -> None:
    encoder = Encoder()
    encoded = encoder.encode(torch.ones(2), "__metadata__")
    assert same(decode(encoded, written_and_read(encoder.tensors).__getitem__), torch.ones(2))
    half_a_pair = {"\ud800": torch.ones(1), "\\ud800": torch.zeros(1)}
    assert same(round_trip(half_a_pair), half_a_pair)


# --- refusals -----------------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        object(),
        int,
        Point(1, 2),
        bytearray(b"x"),
        range(3),
        Path("x"),
        np.array(["a"]),
        np.array([None]),
        np.datetime64("2020-01-01"),
        np.random.RandomState(1),
        iter([1]),
        defaultdict(lambda: 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_say_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match="`state/history/1/best`.*cannot be saved without pickle"):
        Encoder().encode({"history": [0, {"best": value}]}, "state")


def test_a_key_that_json_cannot_say_is_refused_with_the_path_of_its_dict() -> None:
    with pytest.raises(CheckpointError, match="`state/table` is a function"):
        Encoder().encode({"table": {(lambda: 0): 2}}, "state")


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_plain_memory_is_refused_with_its_path(tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match="`state/w` is a .* tensor .*only dense tensors are saved"):
        Encoder().encode({"w": tensor}, "state")


def test_a_kind_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"a value of kind '\$polynomial', which this version does not know"):
        decode({"$polynomial": [1, 2]}, {}.__getitem__)
