"""torchax_core.freeing and the streams' events: what fully_shard asks of a device."""

import jax
import pytest
import torch


def test_memory_is_given_back_and_taken_again():
    x = torch.arange(6.0, device="jax")
    view = x.view(2, 3)
    assert (view + 1).tolist() == [[1, 2, 3], [4, 5, 6]]
    storage = x.untyped_storage()
    assert storage.size() == view.untyped_storage().nbytes() == 24
    before = len(jax.live_arrays())
    assert storage.resize_(0) is storage and storage.resize_(0).size() == 0
    assert len(jax.live_arrays()) == before - 1
    assert x.shape == (6,) and view.shape == (2, 3)
    for use in (lambda: x + 1, lambda: view.sum(), lambda: view.mul_(2), lambda: x.tolist()):
        with pytest.raises(RuntimeError, match=r"of shape \(6,\) was used after its memory was given back"):
            use()
    x.untyped_storage().resize_(24)
    assert x.untyped_storage().size() == 24 and x.tolist() == [0] * 6
    view.copy_(torch.ones(3))
    assert x.tolist() == [1] * 6
    with pytest.raises(RuntimeError, match="an array of 24 bytes, which can be given back .* but not be 5 bytes long"):
        x.untyped_storage().resize_(5)


def test_events_stand_in_the_one_stream():
    stream = torch.jax.current_stream()
    event = stream.record_event()
    event.record(stream)
    event.wait()
    stream.wait_event(event)
    event.synchronize()
    assert isinstance(event, torch.jax.Event) and event.query() is False
    with pytest.raises(RuntimeError, match="time.perf_counter"):
        event.elapsed_time(torch.jax.Event())


class Holding(torch.Tensor):
    """A tensor of somebody else's, which holds one of ours and notes the ops it is asked for."""

    @staticmethod
    def __new__(cls, held, asked):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held, made.asked = held, asked
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        asked = next(a.asked for a in args if isinstance(a, Holding))
        asked.append(func.name())
        held = [a.held if isinstance(a, Holding) else a for a in args]
        return cls(func(*held, **(kwargs or {})), asked)


@pytest.mark.parametrize("grad", [True, False])
def test_what_holds_a_tensor_of_ours_is_asked_for_the_parts_of_a_composite_op(grad):
    """As on other devices: DTensor knows addmm, and no linear or linear_backward."""
    asked: list[str] = []
    x = Holding(torch.ones(2, 3, device="jax"), asked)  # and is asked where one of ours comes first, too
    weight, bias = torch.ones(4, 3, device="jax", requires_grad=grad), torch.ones(4, device="jax")
    result = torch.nn.functional.linear(x, weight, bias)
    assert result.held.tolist() == [[4] * 4] * 2
    assert "aten::addmm" in asked and not [name for name in asked if "linear" in name]
