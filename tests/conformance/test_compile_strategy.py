"""`strategy.compile`: graphs without a break beside every part, the bits of the run without recompute, and names as before."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx import fleet
from fleetx.applications import Bert_base, Resnet50
from fleetx.engine.modules import compiling
from fleetx.engine.modules.compiling import compiled_by, structure
from fleetx.engine.slots import Part, Site
from fleetx.errors import ConfigError, FleetWarning
from fleetx.strategies import catalogue
from fleetx.strategies.compile import Compile
from fleetx.strategies.recompute import Recompute
from fleetx.strategies.sync_batch_norm import SyncBatchNorm
from tests.conformance.test_compiled import PARTS, Normed, assert_alike
from tests.helpers.compiled_runs import Blocks, Seen, batches, loss_by_method, loss_of_call, train

pytestmark = [pytest.mark.usefixtures("alone", "fresh_compiler", "torchs_kernels")]
BFLOAT16 = {"dtype": "bfloat16"}
ROWS = 512
BUDGET = 350_000
"""Bytes: of three blocks of so many rows, two are to be computed again."""


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """Compile to torch's own kernels, those of a run without compile."""
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend(None)


def assert_same_bits(one: Seen, other: Seen) -> None:
    assert one.losses == other.losses
    for a, b in zip(one.weights, other.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.equal(one.random, other.random)  # type: ignore[arg-type]


# --- graphs ---------------------------------------------------------------------------------------------------------------


def test_no_part_is_without_a_row() -> None:
    """sync_batch_norm asks other ranks, which no graph can hold; `auto` trains by the other parts."""
    named = {name for parts in PARTS.values() for name in parts if name != "optimizer"}
    assert named | {"auto", "compile", "sync_batch_norm"} == set(catalogue())


@pytest.mark.parametrize("parts", PARTS)
def test_equal_blocks_make_one_graph_beside(parts: str) -> None:
    seen = train(Blocks, compile=True, **PARTS[parts])
    assert (seen.graphs, seen.breaks) == (1, {})
    assert_alike(seen, train(Blocks, **PARTS[parts]))


@pytest.mark.parametrize("parts", ["none", "amp", "amp and recompute", "lars", "localsgd"])
def test_the_whole_model_is_one_graph_beside(parts: str) -> None:
    seen = train(Blocks, compile={"scope": "model"}, **PARTS[parts])
    assert (seen.graphs, seen.breaks) == (1, {})
    assert_alike(seen, train(Blocks, **PARTS[parts]))


class Unequal(nn.Module):
    """More kinds of blocks than torch's compiler makes graphs of one piece of code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = list(range(8, 21))
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def test_every_kind_of_block_has_its_graph() -> None:
    seen = train(Unequal, compile=True, loss=loss_of_call)
    assert (seen.graphs, seen.breaks) == (12, {})


def test_blocks_are_told_apart_by_layers_and_shapes_alone() -> None:
    one, other = Blocks().blocks[0], Blocks().blocks[1]
    assert structure(one) == structure(other) != structure(Unequal().blocks[0])
    assert structure(nn.Linear(2, 2)) != structure(nn.Linear(2, 2, dtype=torch.float64))
    assert structure(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))) != structure(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2))
    )


def test_the_units_are_those_that_recompute_knows() -> None:
    modules = Compile().modules
    assert list(modules(Blocks())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(modules(Resnet50())) == Resnet50().checkpoints
    bert = Bert_base(hidden=32, layers=3, heads=2, vocab_size=100)
    assert list(modules(bert)) == [name for name in bert.checkpoints if name] != []
    assert list(modules(nn.Linear(2, 2))) == [""]  # nothing inside: the module itself
    assert list(Compile(scope="model").modules(Blocks())) == [""]


# --- with recompute -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [False, BFLOAT16], ids=["float32", "bfloat16"])
def test_blocks_computed_again_by_name_have_the_bits_of_those_that_are_not(amp: Any) -> None:
    plain, again = train(Blocks, compile=True, amp=amp), train(Blocks, compile=True, amp=amp, recompute=True)
    assert (again.graphs, again.breaks) == (1, {})
    assert_same_bits(again, plain)


def test_blocks_computed_again_by_a_budget_have_the_bits_of_those_that_are_not() -> None:
    plain = train(Blocks, compile=True, rows=ROWS)
    again = train(Blocks, compile=True, rows=ROWS, needs_sample=True, recompute={"budget": BUDGET})
    assert again.recomputed == ("blocks.0", "blocks.1")
    assert (again.graphs, again.breaks) == (1, {})  # of planning and of training together
    assert_same_bits(again, plain)


class Cut(nn.Sequential):
    """Layers in a row, which a budget would cut into slices; repeated, so that they are compiled."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(*(nn.Linear(8, 8) if i % 2 else nn.ReLU() for i in range(12))) for _ in range(2)))


def test_a_budget_decides_about_compiled_blocks_as_wholes() -> None:
    seen = train(
        Cut, compile=True, rows=ROWS, needs_sample=True, loss=lambda m, b: m(b[0]).square().mean(), recompute={"budget": "220KB"}
    )
    assert set(seen.recomputed) <= {"0", "1"} and seen.recomputed
    assert (seen.graphs, seen.breaks) == (2, {})  # the first block is given the batch, which needs no gradient


def test_find_batch_compiles_no_graph_for_each_size() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = Blocks()
    found = fleet.find_batch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        fleet.DistributedStrategy(compile=True),
        sample=batches(1, ROWS)[0],
        loss_fn=loss_by_method,
        budget="1MB",
    )
    assert found.most > found.stored > ROWS and found.largest.strategy.compile
    assert counters["stats"]["unique_graphs"] <= 3  # one for all sizes; where a segment is computed again, autocast differs
    assert [compiled_by(block) for block in model.blocks] == [None] * 3


# --- names, methods, copies -----------------------------------------------------------------------------------------------


def test_class_names_and_copies_stay_the_users() -> None:
    model, plain = Blocks(), Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(compile=True))
    assert type(model) is Blocks and list(model.state_dict()) == list(plain.state_dict())
    optimizer.minimize(model.loss(batches()[0]))
    assert [compiled_by(block) for block in model.blocks] == ["strategy"] * 3
    for copied in (copy.deepcopy(model), _saved_whole(model)):
        assert all(compiled_by(module) is None and "forward" not in vars(module) for module in copied.modules())
        x = batches()[0][0]
        torch.testing.assert_close(copied.eval()(x), model.eval()(x))
        model.train()


def _saved_whole(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_second_pair_compiles_anew_and_a_plain_one_not_at_all() -> None:
    model = Blocks()
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(compile=True))
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(compile={"scope": "model"}))
    assert [compiled_by(model), compiled_by(model.blocks[0])] == ["strategy", None]
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy())
    assert {compiled_by(module) for module in model.modules()} == {None}


def test_torch_export_sees_the_model_itself() -> None:
    model = Blocks()
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(compile=True))
    x = batches()[0][0]
    exported = torch.export.export(model.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


# --- what is told and refused ---------------------------------------------------------------------------------------------


def told(make: Callable[[], nn.Module], loss: Any, **strategy: Any) -> list[str]:
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = fleet.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(**strategy)
        )
        for batch in batches(2):
            optimizer.minimize(loss(model, batch))
    return [str(one.message) for one in caught if issubclass(one.category, FleetWarning)]


class Aside(Blocks):
    """Computes its loss without a call of the model itself."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.enter(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), batch[1])


def test_a_loss_that_goes_past_the_compiled_model_is_told() -> None:
    said = told(Aside, loss_by_method, compile={"scope": "model"})
    assert len(said) == 1 and "runs uncompiled" in said[0] and '"scope": "blocks"' in said[0]
    assert told(Aside, loss_by_method, compile=True) == told(Blocks, loss_by_method, compile={"scope": "model"}) == []


def test_what_one_rank_has_not_to_ask_cuts_no_graph() -> None:
    seen = train(Normed, compile={"scope": "model"}, sync_batch_norm=True, loss=loss_of_call)
    assert (seen.graphs, seen.breaks) == (1, {})
    assert told(Normed, loss_of_call, compile={"scope": "model"}, sync_batch_norm=True) == []


def compiled_block() -> nn.Module:
    model = Blocks()
    model.blocks[1].compile(backend="aot_eager")
    return model


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a model compiled in place": (
        lambda: _compiled(Blocks()),
        {"compile": True},
        "the model is compiled already, by torch.compile(...) or .compile(). Keep one of the two.",
    ),
    "a compiled block": (compiled_block, {"compile": True}, "`blocks.1` of the model is compiled already"),
    "a budget over one piece": (
        Blocks,
        {"compile": {"scope": "model"}, "recompute": {"budget": BUDGET}},
        'compile_configs["scope"] "model" makes one piece of them. Write "scope": "blocks"',
    ),
    "a budget over names inside": (
        Blocks,
        {"compile": True, "recompute": {"budget": BUDGET, "checkpoints": ["blocks.*.inner"]}},
        'names `blocks.0.inner`, and a "budget" decides about modules one by one',
    ),
    "CUDA graphs on a CPU": (
        Blocks,
        {"compile": {"mode": "reduce-overhead"}},
        '"reduce-overhead", which records CUDA graphs, and the device is a cpu. Write "mode": "default".',
    ),
    "TorchScript": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 4))),
        {"compile": True},
        "cannot take `0`: it is a TorchScript module",
    ),
}


def _compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_the_line_to_write(what: str) -> None:
    make, strategy, sentence = REFUSED[what]
    model = make()
    with pytest.raises(ConfigError) as caught:
        fleet.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            fleet.DistributedStrategy(**strategy),
            sample=batches(1, ROWS)[0],
            loss_fn=loss_of_call,
        )
    assert sentence in str(caught.value)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.set_default_backend(None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = Blocks()
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler: `no-such-compiler` is not found"):
        fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet.DistributedStrategy(compile=True))
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    assert compiling.cannot_compile(torch.device("cuda")) == "Triton, which writes its kernels, is not installed"


def test_memory_that_cannot_be_counted_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.set_default_backend(None)
    model, x = Blocks(), batches(1, ROWS)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for strategy in ({"compile": True, "recompute": {"budget": BUDGET}}, {"compile": True}):
        with pytest.raises(ConfigError, match="compiled code makes its own, unseen"):
            if "recompute" in strategy:
                fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy), sample=x)
            else:
                fleet.find_batch(model, optimizer, fleet.DistributedStrategy(**strategy), sample=x, budget=BUDGET)


ON_A_GPU: dict[str, tuple[dict[str, Any], list[Part], int, str | None]] = {
    "alone": ({}, [], 1, None),
    "dynamic shapes": ({"dynamic": True}, [], 1, '"dynamic" is True'),
    "recompute of blocks": ({}, [Recompute()], 1, "recompute runs blocks again between those of backward"),
    "recompute in one graph": ({"scope": "model"}, [Recompute()], 1, None),
    "recompute to host memory": ({"scope": "model"}, [Recompute(offload=True)], 1, "recompute runs blocks again"),
    "norms of one rank": ({}, [SyncBatchNorm()], 1, None),
    "norms of two ranks": ({}, [SyncBatchNorm()], 2, "asks the other ranks in the middle of a forward"),
}


@pytest.mark.parametrize("case", ON_A_GPU)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_recorded_graphs_are_refused_beside_what_runs_between_them(mode: str, case: str) -> None:
    settings, others, ranks, sentence = ON_A_GPU[case]
    part = Compile(mode=mode, **settings)

    class Ranks:
        size = ranks

    site = Site(Blocks(), None, {}, Ranks(), torch.device("cuda"), parts=[part, *others])  # type: ignore[arg-type]
    if sentence is None:
        part.refuse_capturing(site)
    else:
        with pytest.raises(ConfigError) as caught:
            part.refuse_capturing(site)
        assert sentence in str(caught.value) and f'"mode"] is "{mode}"' in str(caught.value)
