import json

import pytest

from hpcfsdp.text.json_shapes import parse

SHAPE = {"name": str, "at": (None, [str, int]), "many": [[int, (str, None)]], "share": float, "done": bool}
SOUND = {"name": "a", "at": ["b", 1], "many": [[1, "c"], [2, None]], "share": 0.5, "done": True}


@pytest.mark.parametrize("changed", [{}, {"at": None}, {"many": []}, {"many": [[-(1 << 63), None]]}])
def test_a_value_of_the_shape(changed):
    assert parse(json.dumps(SOUND | changed).encode(), SHAPE) == SOUND | changed


@pytest.mark.parametrize(
    "changed",
    [
        *({"name": value} for value in (1, None, ["a"], {})),
        *({"at": value} for value in ("b", [], ["b"], ["b", 1, 2], ["b", True], [1, "b"])),
        *({"many": value} for value in ([1], [[1]], [[1 << 63, "c"]], [[1.0, "c"]], {}, "ab")),
        {"share": 1},
        {"done": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_value_of_another_shape_is_none(changed):
    assert parse(json.dumps(SOUND | changed).encode(), SHAPE) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"\x80\x04N.", b"[" * 100_000, b'{"name": 1' + b"0" * 5000 + b"}"]
)
def test_what_is_no_json_is_none(text):
    assert parse(text, SHAPE) is None


def test_a_name_that_is_missing():
    assert parse(json.dumps({"name": "a"}).encode(), SHAPE) is None
