"""The KL coefficient's controllers, by hand."""

from __future__ import annotations

import json

import pytest

from ppo_lora.kl_control import AdaptiveKLController, FixedKLController, kl_controller


def test_the_coefficient_by_hand():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10000)
    controller.update(6.6, 500)  # 10% over the target
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 0.05))
    controller.update(5.7, 1000)  # 5% under it
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 0.05) * (1 - 0.05 * 0.1))


@pytest.mark.parametrize(("kl", "error"), [(60.0, 0.2), (0.0, -0.2), (-3.0, -0.2), (7.2, 0.2), (6.0, 0.0)])
def test_the_error_is_clipped(kl, error):
    controller = AdaptiveKLController(1.0, target=6.0, horizon=100)
    controller.update(kl, 50)
    assert controller.value == pytest.approx(1 + error / 2)


def test_a_fixed_coefficient_stays():
    controller = kl_controller(0.3, None, 10000)
    controller.update(100.0, 512)
    assert isinstance(controller, FixedKLController) and controller.value == 0.3
    assert controller.state_dict() == {}


def test_the_state_goes_through_json_to_the_last_bit():
    one, other = (kl_controller(0.1, 6.0, 997) for _ in range(2))
    for kl in (7.1, 3.3, 5.9):
        one.update(kl, 64)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.value == one.value != 0.1


def test_a_loop_settles_at_the_target():
    """Where the KL is 1 / coefficient, the coefficient that gives a KL of 4 is 0.25."""
    controller = AdaptiveKLController(1.0, target=4.0, horizon=256)
    for _ in range(200):
        controller.update(1.0 / controller.value, 64)
    assert controller.value == pytest.approx(0.25, rel=1e-3)
