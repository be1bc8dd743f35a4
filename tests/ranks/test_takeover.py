"""What strategy.lars and strategy.lamb take over from the optimizer given, and what they refuse, with the line to write."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from fleetx import fleet
from fleetx.engine.user_loop.optimizer_hooks import may_change_gradients
from fleetx.errors import ConfigError, FleetWarning
from fleetx.optim import Lamb, Lars
from fleetx.optim.refuse_decay import exclusion_words
from tests.helpers.harness import raised, run_ranks
from tests.helpers.models import batch, cnn, flat_state

pytestmark = pytest.mark.usefixtures("alone")
WRITE_SGD = r"Write torch.optim.SGD\(model.parameters\(\), lr=..., momentum=0.9\)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.ln = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4, bias=False)


class MySGD(SGD):
    pass


def sgd(model: nn.Module, kind: type[SGD] = SGD, **settings: Any) -> SGD:
    return kind(model.parameters(), lr=0.1, momentum=0.9, **settings)


def split(model: Net, plain: Callable[[str], bool], decay: float, without: float = 0.0) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not plain(n)], "weight_decay": decay},
        {"params": [p for n, p in named if plain(n)], "weight_decay": without},
    ]


def is_small(name: str) -> bool:
    return name.startswith("ln") or name.endswith("bias")


REFUSALS: dict[str, tuple[str, Callable[[Net], Optimizer], str]] = {
    "adam for lars": (
        "lars", lambda m: Adam(m.parameters()),
        "place of torch.optim.SGD; the one given is Adam. Write strategy.lamb = True, .*; or torch.optim.SGD",
    ),
    "sgd for lamb": (
        "lamb", lambda m: sgd(m),
        "the place of torch.optim.Adam or torch.optim.AdamW; .* SGD. Write strategy.lars = True, .*; or torch.optim.Adam",
    ),
    "adam for dgc": ("dgc", lambda m: Adam(m.parameters()), f"place of torch.optim.SGD; the one given is Adam. {WRITE_SGD}"),
    "a subclass": ("lars", lambda m: sgd(m, kind=MySGD), "MySGD, a class of your own whose step would be lost"),
    "lars itself": ("lars", lambda m: Lars(m.parameters(), lr=0.1), "Lars. Write .*; or leave strategy.lars out: Lars is a rule"),
    "no momentum": ("lars", lambda m: SGD(m.parameters(), lr=0.1), "needs momentum, .* momentum 0 in a group. Write moment"),
    "nesterov": ("lars", lambda m: sgd(m, nesterov=True), "knows no nesterov, and group 0"),
    "dampening": ("lars", lambda m: sgd(m, dampening=0.1), "dampening=0.1. Write dampening=0"),
    "amsgrad": ("lamb", lambda m: Adam(m.parameters(), amsgrad=True), "knows no amsgrad, .* Write amsgrad=False, or leave"),
    "differentiable": ("lamb", lambda m: Adam(m.parameters(), differentiable=True), "knows no differentiable"),
    "decay": (
        "lamb", lambda m: AdamW(m.parameters()),
        r"weight_decay 0.01. Write weight_decay=0 in AdamW, in all its groups, and "
        r'strategy.lamb_configs = {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": \["norm", "bias"\]}',
    ),
    "decay of some": (
        "lars", lambda m: SGD(split(m, is_small, 1e-4), lr=0.1, momentum=0.9),
        r'strategy.lars_configs = {"lars_weight_decay": 0.0001, "exclude_from_weight_decay": \["norm", "bias"\]}',
    ),
    "embedding without": (
        "lars", lambda m: SGD(split(m, lambda n: is_small(n) or n.startswith("emb"), 1e-4), lr=0.1, momentum=0.9),
        r'"exclude_from_weight_decay": \["norm", "bias", "embedding"\]}',
    ),
    "two decays": (
        "lars", lambda m: SGD(split(m, is_small, 1e-4, 1e-5), lr=0.1, momentum=0.9),
        'in the groups themselves "lars_weight_decay": 0.0001 in group 0, "lars_weight_decay": 1e-05 in group 1',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_with_what_to_write(case: str) -> None:
    part, optimizer, told = REFUSALS[case]
    model = Net()
    with pytest.raises(ConfigError, match=told):
        fleet.distribute(model, optimizer(model), fleet.DistributedStrategy(**{part: True}))


def test_the_suggested_line_leaves_out_just_what_had_no_decay() -> None:
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    for plain in (
        [n for n in names if is_small(n)],
        ["first.weight"],
        ["ln.weight", "first.bias"],
        ["embedding.weight", "ln.bias"],
    ):
        decayed = [n for n in names if n not in plain]
        words = exclusion_words(plain, decayed, model)
        optimizer = Lars(model.parameters(), lr=0.1, model=model, exclude_from_weight_decay=words)
        assert [name for _, _, name, flags in optimizer.parameters_with_flags() if not flags.decay] == sorted(
            plain, key=names.index
        )


def test_names_that_cannot_tell_the_groups_apart_give_no_words() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    assert exclusion_words(["weight"], ["0.weight"], model) is None
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model.weight]}]
    with pytest.raises(ConfigError, match='and "decay": False, "adapt": False in each group that has none'):
        fleet.distribute(model, SGD(groups, lr=0.1, momentum=0.9), fleet.DistributedStrategy(lars=True))


@pytest.mark.parametrize(("part", "build"), [("lars", lambda p: SGD(p, lr=0.1, momentum=0.9)), ("lamb", lambda p: Adam(p))])
def test_an_optimizer_that_has_made_updates_is_refused(part: str, build: Callable[[Any], Optimizer]) -> None:
    model = cnn()
    optimizer = build(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ConfigError, match=rf"has made updates or loaded a state \(on ranks \[0\]\).*load a state of {part} into"):
        fleet.distribute(model, optimizer, fleet.DistributedStrategy(**{part: True}))


def test_state_that_was_only_looked_at_is_none() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert given.state[model[0].weight] == {} and len(given.state) == 1
    trained(model, given, lars=True)


def _loaded_on_one_rank(rank: int) -> str:
    model = cnn()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        model(batch(0, shape=(1, 6, 6))[0]).sum().backward()
        optimizer.step()
    return raised(lambda: fleet.distribute(model, optimizer, fleet.DistributedStrategy(lars=True)))


def test_a_state_on_one_rank_is_refused_on_all() -> None:
    for told in run_ranks(_loaded_on_one_rank, 2):
        assert told.startswith("ConfigError: strategy.lars was given an optimizer that has made updates") and "ranks [0]" in told


# --- after a refusal --------------------------------------------------------------------------------------------------


def trained(model: nn.Module, optimizer: Optimizer, **settings: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # 16 bits are slow on this CPU
        model, ours = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**settings))
    for step in range(3):
        x, y = batch(step, shape=(1, 6, 6))
        ours.minimize(F.cross_entropy(model(x), y))
    return flat_state(model)


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    settings = {"amp": True, "sync_batch_norm": True, "lars": True}
    refused, fresh = cnn(), cnn()
    with pytest.raises(ConfigError, match="knows no nesterov"):
        trained(refused, SGD(refused.parameters(), lr=0.1, momentum=0.9, nesterov=True), **settings)
    assert not any("forward" in vars(module) for module in refused.modules())
    results = [trained(m, SGD(m.parameters(), lr=0.1, momentum=0.9), **settings) for m in (refused, fresh)]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_settings_of_a_pair_that_is_gone_do_not_stay_in_the_groups() -> None:
    model = cnn()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for coefficient in (0.5, 0.25):
        _, ours = fleet.distribute(
            model, optimizer, fleet.DistributedStrategy(lars=True, lars_configs={"lars_coeff": coefficient})
        )
        assert ours.update.param_groups[0]["lars_coeff"] == coefficient
        del ours
        gc.collect()
    trained(model, optimizer)  # and as plain SGD again


# --- what is taken over -----------------------------------------------------------------------------------------------


def test_lars_has_the_groups_settings_and_a_group_may_have_its_own() -> None:
    model = Net()
    params = list(model.parameters())
    groups = [
        {"params": params[:2], "lr": 0.3, "momentum": 0.5, "lars_weight_decay": 0.25},
        {"params": params[2:], "maximize": True, "adapt": False},
    ]
    strategy = fleet.DistributedStrategy(lars=True, lars_configs={"lars_coeff": 0.5, "epsilon": 0.125})
    given = SGD(groups, lr=0.1, momentum=0.9)
    _, ours = fleet.distribute(model, given, strategy)
    assert type(ours.update) is Lars and ours.param_groups is given.param_groups
    keys = ("lr", "momentum", "maximize", "lars_coeff", "lars_weight_decay", "epsilon")
    assert [tuple(group[key] for key in keys) for group in ours.param_groups] == [
        (0.3, 0.5, False, 0.5, 0.25, 0.125),
        (0.1, 0.9, True, 0.5, 0.0005, 0.125),
    ]
    adapted = [line.split()[3] for line in ours.describe().splitlines()[1:]]
    assert adapted == ["yes", "yes", "no", "no", "no", "no"]


def test_fleets_two_calls_do_the_same_in_either_order() -> None:
    strategy = fleet.DistributedStrategy(lars=True)
    results = []
    for model_first in (True, False):
        model = cnn()
        given = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if model_first:
            fleet.distributed_model(model)
        ours = fleet.distributed_optimizer(given, strategy)
        if not model_first:
            fleet.distributed_model(model)
        x, y = batch(0, shape=(1, 6, 6))
        ours.minimize(F.cross_entropy(model(x), y))
        assert type(ours.update) is Lars
        results.append(flat_state(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_lamb_has_betas_and_eps_of_adam(kind: Any) -> None:
    model = Net()
    given = kind(model.parameters(), lr=0.3, betas=(0.5, 0.75), eps=0.125, weight_decay=0)
    _, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lamb=True, lamb_configs={"always_adapt": True}))
    assert type(ours.update) is Lamb
    keys = ("lr", "betas", "eps", "lamb_weight_decay", "always_adapt")
    assert [tuple(group[key] for key in keys) for group in ours.param_groups] == [(0.3, (0.5, 0.75), 0.125, 0.01, True)]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, (None, None)),
        ({"foreach": True}, (True, None)),
        ({"foreach": False}, (False, False)),
        ({"fused": True}, (None, None)),
        ({"fused": False}, (None, False)),
    ],
)
def test_the_way_to_run_that_the_user_chose_is_kept(said: dict[str, bool], meant: tuple[bool | None, bool | None]) -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9, **said)
    _, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True))
    assert (ours.update._want_foreach, ours.update._want_fused) == meant
    x, y = batch(0, shape=(1, 6, 6))
    assert ours.minimize(F.cross_entropy(model(x), y)).updated


def test_frozen_parameters_are_in_the_groups_and_stay_as_they_are() -> None:
    model = cnn()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    trained(model, SGD(model.parameters(), lr=0.1, momentum=0.9), lars=True)
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


def test_hooks_on_the_optimizer_given_go_on_acting() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[str] = []
    given.register_step_post_hook(lambda optimizer, *_: seen.append(type(optimizer).__name__))
    trained(model, given, lars=True)
    assert seen == ["Lars"] * 3


def test_a_first_update_that_is_skipped_makes_no_scheduler_warn() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1)
    _, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True, on_nan_inf="skip"))
    x, y = batch(0, shape=(1, 6, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FleetWarning)  # that it was skipped
        assert ours.minimize(F.cross_entropy(model(x), y) * float("inf")).skipped
    scheduler.step()


def test_the_optimizer_given_sends_its_calls_to_the_one_in_its_place_and_still_shows_the_state() -> None:
    first, second = cnn(), cnn()
    given = SGD(first.parameters(), lr=0.1, momentum=0.9)
    fleet.distribute(first, given, fleet.DistributedStrategy(lars=True))
    _, ours = fleet.distribute(second, SGD(second.parameters(), lr=0.1, momentum=0.9), fleet.DistributedStrategy(lars=True))
    for step in range(3):
        x, y = batch(step, shape=(1, 6, 6))
        F.cross_entropy(first(x), y).backward()
        given.step()
        given.zero_grad()
        ours.minimize(F.cross_entropy(second(x), y))
    given.load_state_dict(given.state_dict())
    torch.testing.assert_close(flat_state(first), flat_state(second), rtol=0, atol=0)
    assert set(given.state_dict()["state"][0]) == {"momentum_buffer"}


def test_the_optimizer_in_its_place_steps_for_the_pipeline_alone() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True))
    x, y = batch(0, shape=(1, 6, 6))
    F.cross_entropy(model(x), y).backward()
    before = flat_state(model)
    with pytest.raises(ConfigError, match=r"it would move this rank alone. Call step\(\) or minimize\(loss\) of the optimizer"):
        ours.update.step()
    torch.testing.assert_close(flat_state(model), before, rtol=0, atol=0)
    assert ours.step().updated and ours.minimize(F.cross_entropy(model(x), y)).updated


def test_a_window_closed_early_steps_too() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    model, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True, **merge))
    x, y = batch(0, shape=(1, 6, 6))
    assert not ours.minimize(F.cross_entropy(model(x), y)).due
    assert ours.flush().updated


def test_hooks_that_only_refuse_keep_no_norms_from_the_rule() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True))
    assert ours.update._optimizer_step_pre_hooks and not may_change_gradients(ours.update._optimizer_step_pre_hooks)
    given.register_step_pre_hook(lambda *_: None)
    assert may_change_gradients(ours.update._optimizer_step_pre_hooks)


def test_norms_are_forgotten_where_some_are_kept() -> None:
    model = cnn()
    _, ours = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(lars=True))
    ours.forget_norms()
    del ours
    gc.collect()
    model = cnn()
    _, ours = fleet.distribute(model, Adam(model.parameters()), fleet.DistributedStrategy(lamb=True))
    with pytest.raises(ConfigError, match=r"Lamb keeps no norms from the last update. Leave forget_norms\(\) out"):
        ours.forget_norms()


def test_settings_of_the_optimizer_given_that_have_no_effect_are_refused_in_mid_run() -> None:
    model = cnn()
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, ours = fleet.distribute(model, given, fleet.DistributedStrategy(lars=True))
    x, y = batch(0, shape=(1, 6, 6))
    assert ours.minimize(F.cross_entropy(model(x), y)).updated
    given.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ConfigError, match="weight_decay=0.1, which Lars does not read. Set lars_weight_decay in the group"):
        ours.minimize(F.cross_entropy(model(x), y))


def test_norms_are_not_kept_on_a_cpu() -> None:
    model = cnn()
    strategy = fleet.DistributedStrategy(lars=True, lars_configs={"carry_norms": True})
    given = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="carry_norms=True saves the kernels a pass, and they do not run here"):
        fleet.distribute(model, given, strategy)
    assert "lars_coeff" not in given.param_groups[0]


def test_a_misspelt_key_in_a_group_is_refused_before_anything_is_taken_over() -> None:
    model = cnn()
    given = SGD([{"params": list(model.parameters()), "lars_coef": 0.5}], lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"group 0 has 'lars_coef', which Lars does not know. Did you mean `lars_coeff`\?"):
        fleet.distribute(model, given, fleet.DistributedStrategy(lars=True))
    assert "lars_coeff" not in given.param_groups[0]


def test_lamb_that_would_adapt_nothing_says_so() -> None:
    model = cnn()
    strategy = fleet.DistributedStrategy(lamb=True, lamb_configs={"lamb_weight_decay": 0.0})
    with pytest.warns(FleetWarning, match="strategy.lamb adapts no tensor here, which makes it Adam"):
        fleet.distribute(model, Adam(model.parameters()), strategy)


def test_a_word_that_matches_nothing_is_refused_with_the_nearest() -> None:
    model = Net()
    strategy = fleet.DistributedStrategy(lars=True, lars_configs={"exclude_from_weight_decay": ["embeding"]})
    with pytest.raises(ConfigError, match="names 'embeding'; no parameter's name contains it. Did you mean `embedding`"):
        fleet.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)


def test_without_such_a_strategy_describe_is_a_sentence() -> None:
    model = cnn()
    _, ours = fleet.distribute(model, SGD(model.parameters(), lr=0.1))
    assert ours.describe() == "SGD treats the parameters of a group alike, as its groups say."
