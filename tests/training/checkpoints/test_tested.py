"""The note that the last test phase has been made: it needs a checkpoint to lie in."""

from multitower.training.checkpoints.saving import Saver
from multitower.training.checkpoints.tested import read_tested


def test_a_note_waits_for_its_checkpoint(tmp_path):
    # The lie: a test phase that is quicker than the save is made at every start.
    class Slow:
        directory = tmp_path

        def wait(self):
            (tmp_path / "2").mkdir()

    Saver(Slow(), 1, 2, {}, {}).note_tested(2, {"waited": 1})
    assert read_tested(tmp_path / "2") == {"waited": 1}
    assert read_tested(tmp_path / "1") is None
