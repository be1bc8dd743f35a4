"""The loss scale follows Fleet's rule, checked by hand."""

from __future__ import annotations

from fleetx.strategies.amp import Amp, next_scale


def _walk(config: Amp, outcomes: str) -> list[float]:
    """The scale after each update: '.' is a clean one, 'x' an overflow."""
    state = (config.init_loss_scaling, 0, 0)
    scales = []
    for outcome in outcomes:
        state = next_scale(*state, finite=outcome == ".", config=config)
        scales.append(state[0])
    return scales


def test_it_shrinks_after_two_overflows_in_a_row_and_not_after_two_apart() -> None:
    config = Amp(init_loss_scaling=64.0)
    assert _walk(config, "x.x.") == [64.0] * 4
    assert _walk(config, "xx") == [64.0, 32.0]


def test_it_grows_after_enough_clean_updates_in_a_row() -> None:
    config = Amp(init_loss_scaling=8.0, incr_every_n_steps=3)
    assert _walk(config, "......") == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]
    assert _walk(config, "..x...") == [8.0, 8.0, 8.0, 8.0, 8.0, 16.0]


def test_it_never_falls_below_one_nor_rises_to_infinity() -> None:
    assert _walk(Amp(init_loss_scaling=1.5, decr_every_n_nan_or_inf=1), "xxx") == [1.0, 1.0, 1.0]
    assert _walk(Amp(init_loss_scaling=3e38, incr_every_n_steps=1), "..") == [3e38, 3e38]


def test_a_fixed_scale_stays() -> None:
    assert _walk(Amp(init_loss_scaling=8.0, use_dynamic_loss_scaling=False, incr_every_n_steps=1), ".x.x") == [8.0] * 4
