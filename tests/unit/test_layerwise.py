"""LARS and LAMB as torch optimizers: schedulers, state, copies, groups, scalers, and what they refuse."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleetx.errors import ConfigError
from fleetx.optim import Lamb, Lars

both = pytest.mark.parametrize("kind", [Lars, Lamb])
WAYS: dict[str, dict[str, Any]] = {"loop": {"foreach": False, "fused": False}, "foreach": {}}
way = pytest.mark.parametrize("way", WAYS)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_equal_bits(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def assert_equal_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for number, state in a["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(value, b["state"][number][key], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@way
@both
def test_a_run_continued_from_a_saved_state_has_the_same_bits(kind: Any, way: str, dtype: torch.dtype) -> None:
    whole, halves = net(dtype), net(dtype)
    optimizer = kind(whole.parameters(), lr=0.1, model=whole, **WAYS[way])
    train(whole, optimizer, range(6))
    first = kind(halves.parameters(), lr=0.1, model=halves, **WAYS[way])
    train(halves, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = kind(halves.parameters(), lr=7.0, model=halves, **WAYS[way])
    second.load_state_dict(torch.load(file, weights_only=True))
    train(halves, second, range(3, 6))
    assert_equal_bits(halves, whole)
    assert_equal_states(second.state_dict(), optimizer.state_dict())


def test_a_state_saved_in_float64_is_cast_to_float32_parameters() -> None:
    wide, narrow = net(torch.float64), net()
    saved = Lamb(wide.parameters(), model=wide)
    train(wide, saved, range(2))
    loaded = Lamb(narrow.parameters(), model=narrow)
    loaded.load_state_dict(saved.state_dict())
    assert {loaded.state[p]["exp_avg"].dtype for p in narrow.parameters()} == {torch.float32}
    train(narrow, loaded, range(2, 4))


@both
def test_a_state_saved_in_float32_serves_16_bit_parameters(kind: Any) -> None:
    wide, narrow = net(), net(torch.bfloat16)
    saved = kind(wide.parameters(), lr=0.1, model=wide)
    train(wide, saved, range(2))
    loaded = kind(narrow.parameters(), lr=0.1, model=narrow)
    loaded.load_state_dict(saved.state_dict())
    moment = loaded.moments[0]
    torch.testing.assert_close(loaded.state[narrow[0].weight][moment], saved.state[wide[0].weight][moment], rtol=0, atol=0)
    train(narrow, loaded, range(2, 4))
    assert loaded.state[narrow[0].weight]["master"].dtype == torch.float32


@both
def test_loading_keeps_the_very_group_dicts(kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model)
    group, saved = optimizer.param_groups[0], optimizer.state_dict()
    group["lr"] = 5.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group and group["lr"] == 0.1


@both
def test_loaded_settings_win_as_torch_has_it_and_flags_follow_the_groups(kind: Any) -> None:
    model = net()
    named = list(model.named_parameters())
    saved = kind([{"params": named, "weight_decay": 0.25, "adapt": False}], lr=0.1).state_dict()
    optimizer = kind([{"params": named, "weight_decay": 0.5}], lr=0.2)
    assert any(flags.adapt for flags in optimizer.flags[0])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][optimizer.decay_key] == 0.25 and optimizer.param_groups[0]["lr"] == 0.1
    assert not any(flags.adapt for flags in optimizer.flags[0])


@pytest.mark.parametrize(
    ("kind", "other", "missing"),
    [
        (Lars, torch.optim.SGD, "epsilon, lars_coeff, lars_weight_decay"),
        (Lamb, torch.optim.Adam, "always_adapt, lamb_weight_decay"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed(kind: Any, other: Any, missing: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model)
    before = copy.deepcopy(optimizer.state_dict())
    theirs = other(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"the state of another optimizer than {kind.__name__}: its groups have no {missing}"):
        optimizer.load_state_dict(theirs.state_dict())
    assert_equal_states(optimizer.state_dict(), before)


@way
@both
def test_a_deep_copy_goes_on_alone_with_the_same_bits(kind: Any, way: str) -> None:
    """Also where a scheduler has wrapped step(): the wrapper belongs to the original."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model, **WAYS[way])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, range(3), scheduler)
    twin_model, twin = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    train(twin_model, twin, range(3, 5))
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param, old, rtol=0, atol=0)
    train(model, optimizer, range(3, 5))
    assert_equal_bits(twin_model, model)
    assert twin.describe() == optimizer.describe()


@way
@both
def test_schedulers_of_rate_and_momentum_act(kind: Any, way: str) -> None:
    by_scheduler, by_hand = net(), net()
    ours, plain = (kind(m.parameters(), lr=0.1, model=m, **WAYS[way]) for m in (by_scheduler, by_hand))
    cycle = torch.optim.lr_scheduler.OneCycleLR(ours, max_lr=0.5, total_steps=8)
    key = "momentum" if kind is Lars else "betas"
    seen = []
    for step in range(6):
        plain.param_groups[0]["lr"], plain.param_groups[0][key] = ours.param_groups[0]["lr"], ours.param_groups[0][key]
        seen.append((ours.param_groups[0]["lr"], ours.param_groups[0][key]))
        train(by_scheduler, ours, range(step, step + 1), cycle)
        train(by_hand, plain, range(step, step + 1))
    assert len(set(seen)) == 6
    assert_equal_bits(by_scheduler, by_hand)


@way
@both
def test_a_rate_may_be_a_tensor(kind: Any, way: str) -> None:
    plain, tensor = net(torch.float64), net(torch.float64)
    train(plain, kind(plain.parameters(), lr=0.25, model=plain, **WAYS[way]), range(3))
    rate = torch.tensor(0.5)
    optimizer = kind(tensor.parameters(), lr=rate, model=tensor, **WAYS[way])
    rate.fill_(0.25)
    train(tensor, optimizer, range(3))
    assert_equal_bits(tensor, plain)


@both
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).shape == () and calls == [True]


@pytest.mark.parametrize("maximize", [False, True])
@way
@both
def test_gradients_are_left_as_they_were(kind: Any, way: str, maximize: bool) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model, maximize=maximize, **WAYS[way])
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        for param, grad in zip(model.parameters(), kept, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)


@both
def test_a_group_added_later_trains_with_settings_of_its_own(kind: Any) -> None:
    model, extra = net(), nn.Parameter(torch.ones(3, 3))
    optimizer = kind(model.named_parameters(), lr=0.1)
    optimizer.add_param_group({"params": [("extra.weight", extra)], "lr": 0.5, "weight_decay": 0.25, "adapt": False})
    assert optimizer.param_groups[1][optimizer.decay_key] == 0.25 and "weight_decay" not in optimizer.param_groups[1]
    assert optimizer.describe().splitlines()[-1].split() == [
        "extra.weight",
        "3x3",
        "yes",
        "no",
        "its",
        "group",
        "says",
        "adapt=False",
    ]
    extra.grad = torch.zeros(3, 3)
    optimizer.step()
    torch.testing.assert_close(extra, torch.full((3, 3), 1 - 0.5 * 0.25), rtol=1e-6, atol=0)


@both
def test_a_group_that_is_refused_is_not_half_added(kind: Any) -> None:
    model = net()
    optimizer = kind(model.named_parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="lr is -1"):
        optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(2, 2)))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(2))


@both
def test_an_empty_group_is_no_obstacle(kind: Any) -> None:
    model = net()
    groups = [{"params": [], "weight_decay": 0.0}, {"params": list(model.parameters())}]
    before = [param.detach().clone() for param in model.parameters()]
    train(model, kind(groups, lr=0.1, model=model), range(2))
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@both
def test_a_sparse_gradient_is_refused_by_name(kind: Any) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = kind(model.parameters(), lr=0.1, model=model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="the gradient of weight is sparse, and La.* needs the norm of all of it"):
        optimizer.step()


@way
@both
def test_a_parameter_without_gradient_is_left_alone_and_not_counted(kind: Any, way: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model, **WAYS[way])
    train(model, optimizer, range(1))
    frozen, before = model[0].weight, model[0].weight.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state[frozen].items()}
    for param in model.parameters():
        param.grad = None if param is frozen else torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(frozen, before, rtol=0, atol=0)
    for key, value in optimizer.state[frozen].items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
    if kind is Lamb:
        assert [float(s["step"]) for s in optimizer.state.values()] == [1, 2, 2, 2, 2, 2]


@way
@both
def test_torchs_grad_scaler_changes_nothing_and_skips_what_overflows(kind: Any, way: str) -> None:
    plain, scaled = net(), net()
    without, optimizer = (kind(m.parameters(), lr=0.1, model=m, **WAYS[way]) for m in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        train(plain, without, range(step, step + 1))
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for poison in (1.0, float("inf")):  # the second is skipped
            optimizer.zero_grad()
            scaler.scale(scaled(x).square().mean() * poison).backward()
            scaler.step(optimizer)
            scaler.update(1024.0)
    assert_equal_bits(scaled, plain)
    assert_equal_states(optimizer.state_dict(), without.state_dict())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": -0.1}, "lr is -0.1; it must be a finite number at least 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": True}, "lr is True"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements; it must have one"),
        ({"lr": 0.1, "weight_decay": -1.0}, "_weight_decay is -1.0; it must be a finite number at least 0"),
        ({"lr": 0.1, "eps": float("inf")}, "eps(ilon)? is inf"),
        ({"lr": 0.1, "maximize": 1}, "maximize is 1; it must be True or False"),
        ({"lr": 0.1, "foreach": True, "fused": True}, "foreach=True and fused=True are two ways to run one update"),
        ({"lr": 0.1, "foreach": 1}, "foreach is 1; it must be True or False"),
        ({"lr": 0.1, "exclude_from_weight_decay": [3]}, "it must be a list of non-empty strings"),
    ],
)
@both
def test_settings_out_of_range_are_refused(kind: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kind([nn.Parameter(torch.ones(2, 2))], **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (Lars, {"momentum": 1.0}, "momentum is 1.0; it must be a finite number at least 0 and below 1"),
        (Lars, {"lars_coeff": 0.0}, "lars_coeff is 0.0; it must be a finite number above 0"),
        (Lars, {"carry_norms": 1}, "carry_norms is 1; it must be True or False"),
        (Lamb, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; it must be a finite number at least 0 and below 1"),
        (Lamb, {"betas": 0.9}, "betas is 0.9; it must be two numbers"),
        (Lamb, {"always_adapt": None}, "always_adapt is None; it must be True or False"),
    ],
)
def test_each_rules_own_settings_are_checked_too(kind: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kind([nn.Parameter(torch.ones(2, 2))], lr=0.1, **settings)


@pytest.mark.parametrize(
    ("kind", "argument", "told"),
    [
        (Lars, "nesterov", "LARS has no Nesterov momentum: leave it out. It takes params, lr, momentum, lars_coeff, lars_weight"),
        (Lars, "trust_coefficient", "Write lars_coeff. It takes"),
        (Lars, "lars_coef", r"Did you mean `lars_coeff`\? It takes"),
        (Lamb, "amsgrad", "LAMB has no AMSGrad: leave it out. It takes params, lr, betas, eps, lamb_weight_decay, exclude"),
        (Lamb, "colour", r"It takes .*, maximize, foreach, fused\.$"),
    ],
)
def test_an_unknown_argument_is_refused_as_python_does(kind: Any, argument: str, told: str) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) has no argument '{argument}'\. {told}"):
        kind([nn.Parameter(torch.ones(2, 2))], lr=0.1, **{argument: 0.1})


@both
def test_a_model_in_the_place_of_its_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"was given a model as its parameters. Write {kind.__name__}\(model.parameters"):
        kind(net(), 0.1)


TWO_SPELLINGS = [
    (Lars, "lars_weight_decay", "weight_decay", 0.0005),
    (Lars, "epsilon", "eps", 0.0),
    (Lamb, "lamb_weight_decay", "weight_decay", 0.01),
    (Lamb, "eps", "epsilon", 1e-6),
]


@pytest.mark.parametrize(("kind", "ours", "theirs", "default"), TWO_SPELLINGS)
def test_two_spellings_of_one_setting_are_refused_also_where_one_has_the_default(
    kind: Any, ours: str, theirs: str, default: float
) -> None:
    weight, given = nn.Parameter(torch.ones(2, 2)), {ours: default, theirs: 0.25}
    told = f"has {theirs}=0.25 and {ours}={default!r}, which are one setting. Write one of them"
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\(...\) {told}"):
        kind([weight], lr=0.1, **given)
    with pytest.raises(ConfigError, match=f"group 0 {told}"):
        kind([{"params": [weight], **given}], lr=0.1)
    assert kind([weight], lr=0.1, **{theirs: 0.25}).param_groups[0][ours] == 0.25
    assert type(kind([weight], lr=0.1).param_groups[0][ours]) is float


@both
def test_the_callers_group_is_left_as_it_was(kind: Any) -> None:
    group = {"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.25}
    for _ in range(2):
        assert kind([group], lr=0.1).param_groups[0][kind.decay_key] == 0.25
    assert set(group) == {"params", "weight_decay"}


@both
def test_complex_and_integer_parameters_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="takes real floating-point parameters; one is torch.complex64"):
        kind([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (Lars, {"carry_norms": True}, "carry_norms=True saves the kernels a pass, and they do not run here. Leave it out"),
        (Lars, {"carry_norms": True, "foreach": True}, "carry_norms=True saves the kernels a pass"),
        (Lars, {"fused": True}, "fused=True, but the kernels run on CUDA devices, and some parameters are on cpu. Leave fused"),
        (Lamb, {"fused": True}, "fused=True, but the kernels run on CUDA devices"),
    ],
)
def test_what_only_kernels_do_is_refused_on_a_cpu_at_once(kind: Any, settings: dict[str, Any], told: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=told):
        kind(model.parameters(), lr=0.1, model=model, **settings)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), torch.tensor(-0.1)])
@way
@both
def test_a_rate_that_became_none_is_refused_before_anything_moves(kind: Any, way: str, rate: Any) -> None:
    model = net()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[3])]
    optimizer = kind(groups, lr=0.1, model=model, **WAYS[way])
    train(model, optimizer, range(1))
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(ConfigError, match="lr of group 1 is .*; it must be a finite number at least 0"):
        train(model, optimizer, range(1, 2))
    assert_equal_bits(model, before)
    for number, kept in state.items():
        for key, value in kept.items():
            torch.testing.assert_close(optimizer.state_dict()["state"][number][key], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "weight_decay",
            0.1,
            "group 0 has weight_decay=0.1, which La.* does not read. Set la.*_weight_decay in the group",
        ),
        ("nesterov", True, "group 0 has nesterov=True, and La.* knows no nesterov. Leave it out"),
        ("dampening", 0.5, "knows no dampening"),
        ("amsgrad", True, "knows no amsgrad"),
    ],
)
@both
def test_a_setting_without_effect_is_refused_in_mid_run(kind: Any, key: str, value: Any, told: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, model=model)
    train(model, optimizer, range(1))
    before = copy.deepcopy(model)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ConfigError, match=told):
        train(model, optimizer, range(1, 2))
    assert_equal_bits(model, before)


@pytest.mark.parametrize(
    ("kind", "key", "near"),
    [
        (Lars, "lars_coef", "lars_coeff"),
        (Lars, "adapts", "adapt"),
        (Lars, "lars_decay", "lars_weight_decay"),
        (Lars, "lamb_weight_decay", "lars_weight_decay"),
        (Lamb, "always_adapts", "always_adapt"),
        (Lamb, "beta", "betas"),
    ],
)
def test_a_key_of_a_group_that_is_nearly_a_setting_is_refused(kind: Any, key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"group 0 has '{key}', which {kind.__name__} does not know. Did you mean `{near}`\?"):
        kind([{"params": [nn.Parameter(torch.ones(2, 2))], key: 0.5}], lr=0.1)


@both
def test_keys_of_the_users_own_and_of_schedulers_are_allowed_in_groups(kind: Any) -> None:
    own = {"name": "head", "lr_scale": 0.5, "weight_decay_mult": 0.0, "initial_lr": 0.1, "max_momentum": 0.9, "layer": 3}
    group = kind([{"params": [nn.Parameter(torch.ones(2, 2))], **own}], lr=0.1).param_groups[0]
    assert {key: group[key] for key in own} == own


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_state_loads_any_number_of_times_and_into_a_copy(kind: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = kind([("w", param)], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for target in (optimizer, optimizer, copy.deepcopy(optimizer)):
        target.load_state_dict(saved)
        assert target.state_dict()["param_groups"][0]["lr"] == 0.1


def test_lamb_follows_a_weight_decay_that_is_switched_off_in_mid_run_as_a_resumed_run_would() -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Lamb([("w", param)], lr=0.1)
    assert optimizer.flags[0][0].adapt
    optimizer.param_groups[0]["lamb_weight_decay"] = 0.0
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert not optimizer.flags[0][0].adapt and optimizer.trust_ratios() is None


def test_a_group_that_is_not_decayed_is_not_adapted_by_lamb_unless_it_says_so() -> None:
    def flags_of(**said: bool) -> tuple[bool, bool]:
        [[flags]] = Lamb([{"params": [("w", torch.nn.Parameter(torch.ones(3, 2)))], **said}], lr=0.1).flags
        return flags.decay, flags.adapt

    assert flags_of(decay=False) == (False, False)
    assert flags_of(decay=False, adapt=True) == (False, True)
    assert flags_of(decay=False, always_adapt=True) == (False, True)
    assert flags_of() == (True, True)


def test_a_group_without_parameters_takes_steps_that_do_nothing() -> None:
    assert Lars([{"params": []}], lr=0.1).step() is None
