"""Records of runs over several processes: which process differs is named, and texts keep them."""

import json

from multitower.proof.record import Spot, StepRecord, as_facts, from_facts
from multitower.proof.verification import compare_records

LEAF = "params['w']"


def record(*processes, parts=None):
    """One step; each process gives {(stage, place): digest} of one leaf."""
    digests = [
        {Spot(stage, place, LEAF): value for (stage, place), value in one.items()}
        for one in processes
    ]
    return [StepRecord(digests, "f" * 64, parts or {"params": "p"})]


ALONE = record({("tower program", 0): "a", ("tower program", 1): "b", ("update", 0): "u"})


def differences(*records):
    found = compare_records(["1 x 2", "2 x 1"], records)
    return [str(one) for one in found.differences]


def test_towers_are_compared_wherever_they_run():
    """Lie: process 0 of one layout against process 0 of another, which has other towers."""
    two = record(
        {("tower program", 0): "a", ("update", 0): "u"},
        {("tower program", 1): "b", ("update", 0): "u"},
    )
    assert differences(ALONE, two) == []
    assert differences(two, ALONE) == []


def test_the_first_process_that_differs_is_named():
    """Lie: the copy of process 0, which is right, taken for those of all processes."""
    tower = record({("tower program", 0): "a"}, {("tower program", 1): "x", ("update", 0): "u"})
    said = f"step 1: 1 x 2 and 2 x 1 part in the tower program (tower 1 in process 1): {LEAF}"
    assert differences(ALONE, tower) == [said]
    copy = record({("tower program", 0): "a", ("update", 0): "u"}, {("update", 0): "x"})
    said = f"step 1: 1 x 2 and 2 x 1 part in the update (the copy on device 0 of process 1): {LEAF}"
    assert differences(ALONE, copy) == [said]


def test_a_stage_is_looked_at_in_all_processes_before_the_next_one():
    """Lie: an update that follows from another tower's gradient, named as the cause."""
    both = record({("update", 0): "x"}, {("tower program", 1): "x"})
    assert "part in the tower program (tower 1 in process 1)" in differences(ALONE, both)[0]


def test_processes_of_the_first_run_are_compared_too():
    first = record({("update", 0): "u"}, {("update", 0): "x"})
    (said,) = [str(one) for one in compare_records(["2 x 1"], [first]).differences]
    assert "2 x 1 and 2 x 1 part in the update (the copy on device 0 of process 1)" in said


def test_a_record_is_the_same_after_json():
    both = record({("tower program", 10): "a"}, {("update", 0): "u", ("update", 1): "v"})
    assert from_facts(json.loads(json.dumps(as_facts(both)))) == both
