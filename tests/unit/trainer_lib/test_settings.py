from __future__ import annotations

import pytest

from backstay.errors import MisuseError
from backstay.settings import read_settings, why_off


def test_a_process_outside_of_backstay_is_off() -> None:
    assert "BACKSTAY_VOLUME is not set" in why_off({})


@pytest.mark.parametrize("value", ["off", "OFF"])
def test_it_can_be_switched_off(value) -> None:
    assert why_off({"BACKSTAY_VOLUME": "/memory", "BACKSTAY": value}) == "BACKSTAY=off"


def test_the_launchers_variables_are_read() -> None:
    environment = {
        "BACKSTAY_VOLUME": "/memory",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "BACKSTAY_EXIT_WITH_PARENT": "1",
    }

    settings = read_settings(environment)

    assert why_off(environment) == ""
    assert (settings.rank, settings.local_rank, settings.world_size) == (5, 1, 8)
    assert (settings.local_world_size, settings.exit_with_parent) == (4, True)


def test_a_single_process_needs_no_launcher() -> None:
    settings = read_settings({"BACKSTAY_VOLUME": "/memory"})

    assert (settings.rank, settings.world_size, settings.exit_with_parent) == (0, 1, False)


@pytest.mark.parametrize(
    ("environment", "says"),
    [({"RANK": "x"}, "RANK is 'x'"), ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2")],
    ids=["not-a-number", "out-of-range"],
)
def test_a_wrong_variable_is_named(environment, says) -> None:
    with pytest.raises(MisuseError, match=says):
        read_settings({"BACKSTAY_VOLUME": "/memory", **environment})
