"""`strategy.compile` on models of transformers: equal layers are one graph, beside a lean head and recompute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fleetx import fleet
from fleetx.errors import FleetWarning
from fleetx.integrations.lean_head import OnDemandLogits, lean
from fleetx.integrations.transformers import lean as public_lean
from tests.conformance.test_lean_head import CAUSAL, DROPLESS, ENDS, GPT2, OUTPUT, SMALL, _batch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.usefixtures("alone", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
LAYERS = 3
SEVERAL = {**SMALL, "num_hidden_layers": LAYERS}
MODELS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: transformers.BertForPreTraining(transformers.BertConfig(**SEVERAL, **DROPLESS)),
    "RoBERTa": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SEVERAL, **DROPLESS)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**GPT2, "n_layer": LAYERS}, bos_token_id=0, eos_token_id=1)
    ),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SEVERAL, **ENDS, num_key_value_heads=2)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SEVERAL, **ENDS, num_key_value_heads=2)),
}


@pytest.fixture(autouse=True)
def torchs_kernels() -> Iterator[None]:
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend(None)


def trained(name: str, *, caches: bool = False, **strategy: Any) -> tuple[list[torch.Tensor], Any, int, dict[str, int]]:
    """Return weights after two updates, the last logits, and what the compiler made."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = lean(MODELS[name]())
    model.config.use_cache = caches
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**strategy))
    for _ in range(2):
        found = model(**_batch(name))
        optimizer.minimize(found.loss)
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return list(model.parameters()), found[OUTPUT.get(name, "logits")], graphs, breaks


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_are_one_graph_beside_a_lean_head_and_recompute(name: str) -> None:
    plain, _, none, _ = trained(name)
    for strategy in ({"compile": True}, {"compile": True, "recompute": True}):
        weights, logits, graphs, breaks = trained(name, **strategy)
        assert (none, graphs, breaks) == (0, 1, {})
        assert isinstance(logits, OnDemandLogits)
        for a, b in zip(weights, plain, strict=True):  # float32; sums of decomposed operations may be of another order
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_that_training_never_reads_is_told_with_the_line_to_write(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(name, caches=True, compile=True)
    told = [str(one.message) for one in caught if issubclass(one.category, FleetWarning)]
    assert len(told) == 1 and "model.config.use_cache = False" in told[0]


def test_the_public_name_is_the_same() -> None:
    assert public_lean is lean
