"""Work that fails on one rank raises on all of them, and the ranks stay in step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from fleetx.dist import world
from fleetx.dist.agree import Failures, ranks_where, run_and_share, run_on_all, run_on_first
from fleetx.dist.comm import SoloComm
from fleetx.errors import ConfigError, DataError
from tests.helpers.harness import raised, run_ranks


def _config_error(failures: Failures) -> ConfigError:
    return ConfigError(f"{list(failures.by_rank)}: {failures.text}")


def _work(rank: int, failing: list[int], error: Exception) -> int:
    if rank in failing:
        raise error
    return rank + 10


def _ranks_run(rank: int) -> dict[str, Any]:
    comm = world.current().comm
    told = {
        "well": run_and_share(comm, lambda: _work(rank, [], ValueError()), lambda result: 2 * result, fails=_config_error),
        "one": raised(lambda: run_on_all(comm, lambda: _work(rank, [1], ValueError("bad")), fails=_config_error)),
        "equal": raised(lambda: run_on_all(comm, lambda: _work(rank, [0, 2], DataError("bad")), fails=_config_error)),
        "first": run_on_first(comm, lambda: {"made by": rank}, fails=_config_error),
        "first fails": raised(lambda: run_on_first(comm, lambda: _work(rank, [0], OSError("full")), fails=_config_error)),
        "where": ranks_where(comm, rank != 1),
    }
    return told | {"in step": comm.gather_json(rank)}


def test_what_fails_on_one_rank_raises_on_all_and_the_next_collective_pairs_up() -> None:
    for rank, told in enumerate(run_ranks(_ranks_run, 3)):
        assert told["well"] == (rank + 10, [20, 22, 24])
        assert told["one"] == "ConfigError: [1]: ValueError: bad"
        assert told["equal"] == "ConfigError: [0, 2]: bad"
        assert told["first"] == {"made by": 0}
        assert told["first fails"] == "ConfigError: [0]: OSError: full"
        assert told["where"] == [0, 2] and told["in step"] == [0, 1, 2]


def test_errors_of_a_kind_that_is_not_caught_are_raised_as_they_are() -> None:
    with pytest.raises(ValueError, match="^bad$"):
        run_on_all(SoloComm(), lambda: _work(0, [0], ValueError("bad")), fails=_config_error, catches=DataError)


def test_the_error_of_this_rank_is_the_cause_and_no_cycle_keeps_its_frames() -> None:
    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def fails() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise ValueError("bad")

    gc.disable()
    try:
        try:
            run_on_all(SoloComm(), fails, fails=_config_error)
        except ConfigError as error:
            assert isinstance(error.__cause__, ValueError)
            del error
        assert kept[0]() is None
    finally:
        gc.enable()
