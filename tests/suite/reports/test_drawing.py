"""Tests of the paths of drawings."""

import pytest

from flashproof.reports.drawing import Drawing


@pytest.mark.parametrize(
    ("points", "path"),
    [
        pytest.param([(0, 1), (1, 1), (2.5, 1), (2.5, 3), (4, 4.2)], "m0 1h2.5v2l1.5 1.2", id="steps"),
        pytest.param([(0, 0), (2, 0), (1, 0), (0, 0)], "m0 0h2h-2", id="back"),
        pytest.param([(1, 1), (1, 1)], "m1 1v0", id="one point"),
        pytest.param([(1, 5), (3, 4), (5, 4), (7, 4), (9, 3.5)], "m1 5l2-1h4l2-.5", id="level"),
    ],
)
def test_a_curve_names_no_point_within_a_level_line(points: list[tuple[float, float]], path: str) -> None:
    drawing = Drawing(10, 10, "a curve")
    drawing.curve(points, "line")
    assert drawing.parts == [f'<path class="line" d="{path}"/>']
