"""What a link to a shadow says again after its connection broke."""

from lastgood.gradients.links import _again, _Outgoing
from lastgood.gradients.messages import Saved, Step


def test_a_step_that_is_sent_again_asks_for_no_spill():
    keep = Saved(epoch=1, iteration=2, step=2)
    step = Step(iteration=4, rule={}, saved=True, step=4, spill=True, keep=keep)
    again = _again(_Outgoing(step, 4, memoryview(b"")))
    assert again == _Outgoing(step.model_copy(update={"spill": False, "keep": None}), 4, memoryview(b""))
