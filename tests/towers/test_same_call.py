"""Same call: what differs between processes is named, whichever of them has it."""

import json
from types import SimpleNamespace

import pytest

import multitower as mt
from multitower.towers import same_call


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (({"steps": 3}, {"steps": 4}), "steps is 3 in process 0, and 4 in process 1"),
        (({"steps": 3, "sync_every": 2}, {"steps": 3}), "sync_every is 2 .* None in process 1"),
        (({"steps": 3}, {"steps": 3, "sync_every": 2}), "sync_every is None .* 2 in process 1"),
    ],
)
def test_a_setting_of_one_process_alone_is_named(settings, said, monkeypatch):
    # The lie: they agree, since process 0 has nothing that another one lacks; and one waits.
    monkeypatch.setattr(same_call, "texts_of_all", lambda _: [*map(json.dumps, settings)])
    placement = SimpleNamespace(spans_processes=True)
    with pytest.raises(mt.ArgumentError, match=f"fit: {said}"):
        same_call.check_alike("fit", {}, placement)
