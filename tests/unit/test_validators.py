"""Each validator on texts that are right, wrong, cut, foreign and hostile."""

import itertools
import json
import math
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.evidence.validators.base import MAX_TEXT, MAX_WHY, ParameterError, Tag, judge
from deployments.evidence.validators.code_blocks import blocks
from deployments.evidence.validators.entity_table import MAX_ROWS, EntityTable
from deployments.evidence.validators.registry import KINDS, MAX_SPEC_BYTES, Registry

REGISTRY = Registry()
FENCE = "```"


def tag(text: str, name: str, /, context: dict[str, Any] | None = None, **parameters: Any) -> Tag:
    return judge(REGISTRY.resolve({"name": name, **parameters}), text, context or {})


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("x = 1\n", "valid"),
        ("    x = 1\n    y = 2", "valid"),  # cut out of a function
        ("def f(:\n  pass", "invalid"),
        ("return 1", "invalid"),
        ("It is four.", "invalid"),
        ("", "unknown"),
        (f"Here:\n{FENCE}python\nprint(1)\n{FENCE}\nDone.", "valid"),
        (f"{FENCE}python\nprint(1\n{FENCE}", "invalid"),
        (f"{FENCE}python\nprint(1\n", "unknown"),  # the text ends before the block does
        (f"{FENCE}\nx = 1\n{FENCE}", "valid"),
        (f"{FENCE}js\nlet x = 1;\n{FENCE}", "unknown"),
        (f"{FENCE}js\nlet x = 1;\n{FENCE}\n{FENCE}py\nx ==== 1\n{FENCE}", "invalid"),
        ("x = '\0'", "invalid"),
        ("import os; os._exit(1)", "valid"),  # compiled, never run
        ("1" * 5000, "invalid"),
        ("-" * 16_000 + "1", "unknown"),
        ("(" * 16_000, "invalid"),
    ],
)
def test_python(text: str, want: str) -> None:
    assert tag(text, "python_syntax").tag == want


def test_python_without_fences_can_be_left_alone() -> None:
    assert tag("It is four.", "python_syntax", unfenced=False).tag == "unknown"
    assert tag(f"{FENCE}py\n)\n{FENCE}", "python_syntax", unfenced=False).tag == "invalid"


def test_python_says_where() -> None:
    assert "line 2" in tag("x = 1\ny = = 2", "python_syntax").why
    assert "block 2" in tag(f"{FENCE}py\nx=1\n{FENCE}\n{FENCE}py\n)\n{FENCE}", "python_syntax").why


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"a": [1, 2.5e3, null, true]}', "valid"),
        ("  3  ", "valid"),
        ("{'a': 1}", "invalid"),
        ("[1, 2,]", "invalid"),
        ("NaN", "invalid"),
        ('{"a": 1} and more', "invalid"),
        (f"Here it is:\n{FENCE}json\n[1]\n{FENCE}", "valid"),
        (f"{FENCE}json\n[1,\n", "unknown"),
        ("9" * 10_000, "valid"),
        ("[" * 16_000, "unknown"),
        ("", "invalid"),
    ],
)
def test_json(text: str, want: str) -> None:
    assert tag(text, "json_syntax").tag == want


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_whatever_json_writes_is_json(value: Any) -> None:
    text = json.dumps(value)
    assert tag(text, "json_syntax").tag == "valid"
    assert tag(f"So:\n{FENCE}json\n{text}\n{FENCE}", "json_schema", schema=True).tag == "valid"


def test_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "maximum": 9}}}
    assert tag('{"n": 9}', "json_schema", schema=schema).tag == "valid"
    assert tag('{"n": 10}', "json_schema", schema=schema).why == "$.n: 10 is greater than the maximum of 9"
    assert tag("{}", "json_schema", schema=schema).tag == "invalid"
    assert tag("{", "json_schema", schema=schema).tag == "invalid"
    assert tag('{"n": 1}', "json_schema", schema=False).tag == "invalid"


def test_schema_is_checked_and_never_fetched() -> None:
    with pytest.raises(ParameterError, match="json_schema: schema: not a JSON schema"):
        REGISTRY.resolve({"name": "json_schema", "schema": {"type": "integr"}})
    with pytest.raises(ParameterError, match="missing required field `schema`"):
        REGISTRY.resolve({"name": "json_schema"})
    outside = tag("1", "json_schema", schema={"$ref": "http://127.0.0.1:9/secret.json"})
    assert (outside.tag, "127.0.0.1" in outside.why) == ("unknown", True)
    assert tag("[[1]]", "json_schema", schema={"$ref": "#"}).tag == "unknown"  # refers to itself without end
    inside = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert tag('[1, "a"]', "json_schema", schema=inside).tag == "invalid"


@pytest.mark.parametrize(
    ("text", "numbers", "want"),
    [
        ("A discount of 20% is fine.", [{"max": 30, "unit": "%"}], "valid"),
        ("A discount of 40 % is fine.", [{"max": 30, "unit": "%"}], "invalid"),
        ("It weighs 40 kg, 20% more.", [{"max": 30, "unit": "%"}], "valid"),
        ("It weighs 40 kg.", [{"max": 30, "unit": "%"}], "unknown"),
        ("It costs €40.", [{"max": 30, "unit": "€"}], "invalid"),
        ("It costs 1,250.50.", [{"max": 1000}], "invalid"),
        ("Minus: -5 degrees.", [{"min": -4}], "invalid"),
        ("Version 2.0.1 of TX-99.", [{"max": 1}], "unknown"),  # no numbers, identifiers
        ("The discount is 50. The price is 10.", [{"word": "price", "max": 20}], "valid"),
        ("The discount is 50. The price is 30.", [{"word": "price", "max": 20}], "invalid"),
        ("Three and 3.5 people.", [{"integer": True}], "invalid"),
        ("On 2024-05-06 there were 3.", [{"max": 10}], "valid"),  # a date's numbers are none
        ("40 grams", [{"max": 30, "unit": "g"}], "unknown"),
    ],
)
def test_numbers(text: str, numbers: list[dict[str, Any]], want: str) -> None:
    assert tag(text, "ranges", numbers=numbers).tag == want


@pytest.mark.parametrize(
    ("text", "dates", "want"),
    [
        ("Due 2024-03-01.", {"min": "2024-01-01", "max": "2024-12-31"}, "valid"),
        ("Due March 1st, 2025.", {"max": "2024-12-31"}, "invalid"),
        ("Due 1 March 2023.", {"min": "2024-01-01"}, "invalid"),
        ("Due 30 February 2024.", {}, "invalid"),
        ("Due 2023-02-29.", {}, "invalid"),
        ("Due 05/06/2024.", {"max": "2024-05-31"}, "unknown"),  # 6 May or 5 June?
        ("Due 05/06/2024.", {"max": "2024-05-31", "order": "month"}, "valid"),
        ("Due 05.06.2024.", {"max": "2024-05-31", "order": "day"}, "invalid"),
        ("Due 25/12/2024.", {"max": "2024-12-31"}, "valid"),
        ("Due 25/13/2024.", {}, "invalid"),
        ("Since March 2024.", {"min": "2024-03-15"}, "valid"),  # some day of it may be meant
        ("Since March 2024.", {"min": "2024-04-01"}, "invalid"),
        ("Marching 1984 steps.", {}, "unknown"),
        ("Due 2026-01-02.", {"max": "today"}, "invalid"),
        ("Due 2026-01-02.", {"max": "today+1"}, "valid"),
        ("No date.", {"max": "today"}, "unknown"),
    ],
)
def test_dates(text: str, dates: dict[str, Any], want: str) -> None:
    assert tag(text, "ranges", {"today": "2026-01-01"}, dates=dates).tag == want


@given(
    st.dates(date(1000, 1, 1)),
    st.dates(date(1000, 1, 1)),
    st.sampled_from(["%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%d/%m/%Y"]),
)
def test_a_date_is_below_its_bound_or_not(day: date, last: date, form: str) -> None:
    found = tag(f"On {day.strftime(form)}.", "ranges", dates={"max": last.isoformat(), "order": "day"})
    assert found.tag == ("valid" if day <= last else "invalid")


TABLE = [
    {"name": "Tessaro", "kind": "city", "country": "Ombria", "people": "40,000"},
    {"name": "Veldt", "kind": "city", "aliases": ["Old Veldt"], "country": "Sarn"},
    {"name": "Ombria", "kind": "country", "capital": "Tessaro"},
    {"name": "Sarn", "kind": "country", "capital": "Veldt"},
    {"name": "Ilune", "kind": "river"},
    {"name": "TX-20", "kind": "part", "price": "12"},
]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The capital of Ombria is Tessaro.", "valid"),
        ("The capital of Ombria is Veldt.", "invalid"),
        ("The capital of Ombria is Old Veldt.", "invalid"),
        ("The capital of Ombria is not Veldt.", "unknown"),
        ("The river Tessaro is long.", "invalid"),
        ("Tessaro is a river.", "invalid"),
        ("The city of Tessaro is old.", "valid"),
        ("The price of TX-20 is 12.", "valid"),
        ("The price of TX-20 is 15.", "invalid"),
        ("TX-20 and TX-21 fit.", "unknown"),
        ("Tessaro lies near Brunt.", "unknown"),
        ("Nothing is named here.", "unknown"),
        ("Tessaro has 40,000 people.", "valid"),
        ("Tessaro has 50,000 people.", "invalid"),
    ],
)
def test_entities(text: str, want: str) -> None:
    assert tag(text, "entities", rows=TABLE).tag == want


def test_entity_files(tmp_path: Path) -> None:
    table = tmp_path / "parts.csv"
    table.write_text("name,kind,aliases,price\nTX-20,part,T twenty|TX20,12\n")
    registry = Registry({"parts": {"kind": "entities", "file": str(table)}})
    assert registry.parameters("parts") == ["rows"]
    assert judge(registry.resolve({"name": "parts"}), "The price of TX20 is 13.", {}).tag == "invalid"
    table.write_text("name,kind,aliases,price\nTX-20,part,T twenty|TX20,13\n")
    assert judge(registry.resolve({"name": "parts"}), "The price of TX20 is 13.", {}).tag == "valid"
    (tmp_path / "p.yaml").write_text("- {name: TX-20, kind: part}\n")
    Registry({"parts": {"kind": "entities", "file": str(tmp_path / "p.yaml")}})


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.csv", "name,colour\nTX,red\n", "row 1: needs a name and a kind"),
        ("a.csv", "name,kind\n", "no rows"),
        ("a.yaml", "{a: 1}", "must be a list of rows"),
        ("a.yaml", "- [", "cannot be read"),
        ("a.txt", "x", "must be .csv or .yaml"),
        ("a.csv", "name,kind\none two three four five six seven,k\n", "more than 6 words"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, file: str, content: str, says: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(ParameterError, match=f"t: .*{says}"):
        Registry({"t": {"kind": "entities", "file": str(tmp_path / file)}})


def test_tables_are_bounded() -> None:
    with pytest.raises(ValueError, match="more than"):
        EntityTable.of(({"name": f"N{i}", "kind": "k"} for i in range(MAX_ROWS + 1)), "rows")


def test_names_and_parameters() -> None:
    configured = {
        "polite": {"kind": "custom", "function": "tests.unit.validator_functions:short", "parameters": {"most": 3}},
        "order": {"kind": "json_schema"},  # the request brings the schema
        "loose": {"kind": "python_syntax", "unfenced": False},
    }
    registry = Registry(configured)
    assert registry.names() == [
        "python_syntax",
        "json_syntax",
        "json_schema",
        "ranges",
        "entities",
        "loose",
        "order",
        "polite",
    ]
    assert (registry.parameters("order"), registry.parameters("loose"), registry.parameters("polite")) == (
        ["schema"],
        [],
        [],
    )
    for spec, says in [
        ({"name": "spelling"}, "no validator 'spelling'; known: python_syntax, json_syntax"),
        ({"name": "custom", "function": "os:system"}, "no validator 'custom'; known: "),
        ({"name": "polite", "function": "os:system"}, "polite.function: not a parameter here; known: none"),
        ({"name": "loose", "unfenced": True}, "loose.unfenced: not a parameter here; known: none"),
        ({"name": "entities", "file": "/etc/passwd"}, "entities.file: not a parameter here; known: rows"),
        ({"name": "ranges", "nubmers": []}, "ranges.nubmers: not a parameter here; known: numbers, dates, decimal"),
        ({"name": "python_syntax", "unfenced": 1}, "python_syntax.unfenced: Expected `bool`, got `int`"),
        ({"name": "ranges", "numbers": [{"mx": 1}]}, "unknown field `mx`"),
        ({"name": "ranges", "dates": {"max": "soon"}}, "'soon' is no bound"),
        ({"name": "ranges", "numbers": [{"min": 2, "max": 1}]}, "min 2 is above max 1"),
        ({"name": "order", "schema": {"enum": ["x" * MAX_SPEC_BYTES]}}, "larger than"),
        ({}, "a validator needs a name"),
    ]:
        for check in (registry.resolve, registry.check, Registry(configured, check_only=True).check):
            with pytest.raises(ParameterError) as error:
                check(spec)
            assert says in str(error.value)


def test_requests_are_checked_where_the_operators_files_are_not() -> None:
    registry = Registry({"parts": {"kind": "entities", "file": "/nowhere.csv"}}, check_only=True)
    registry.check({"name": "parts"})
    registry.check({"name": "json_schema", "schema": {}})
    with pytest.raises(ParameterError, match="not a JSON schema"):
        registry.check({"name": "json_schema", "schema": {"type": 1}})


@pytest.mark.parametrize(
    ("configured", "says"),
    [
        ({"x": {"kind": "spelling"}}, "x.kind: no kind 'spelling'; known: python_syntax"),
        ({"ranges": {"kind": "ranges"}}, "ranges: is the name of a kind"),
        ({"x": {"kind": "custom", "function": "os.system"}}, "x.*must be package.module:function"),
        (
            {"x": {"kind": "custom", "funtion": "a:b"}},
            "x.funtion: not a parameter of custom; known: function, parameters",
        ),
        ({"x": {"kind": "entities", "file": "/nowhere.csv"}}, "x: .*nowhere.csv"),
        ({"x": {"kind": "json_schema", "schema": {"type": 1}}}, "x: schema: not a JSON schema"),
    ],
)
def test_configuration_errors_name_the_validator(configured: dict[str, dict[str, Any]], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        Registry(configured)


def test_cut_drafts_are_not_blamed_for_what_is_missing() -> None:
    cut = {"finished": False}
    assert tag("x = (1 +", "python_syntax", cut).tag == "unknown"
    assert tag('{"a": ', "json_syntax", cut).tag == "unknown"
    assert tag("It costs 40 €.", "ranges", cut, numbers=[{"max": 30}]).tag == "invalid"  # wrong already


@pytest.mark.parametrize("name", [name for name in KINDS if name != "custom"])
@given(text=st.text(max_size=300))
def test_any_text_gets_a_bounded_tag(name: str, text: str) -> None:
    parameters = {
        "json_schema": {"schema": {}},
        "ranges": {"numbers": [{"max": 1}], "dates": {}},
        "entities": {"rows": TABLE},
    }
    found = tag(text, name, **parameters.get(name, {}))
    assert found.failure == ""
    assert len(found.why) <= MAX_WHY


HOSTILE = [
    "`",
    "```a",
    "~~~ ",
    "a" * 9 + " ",
    ". ",
    ".  ",
    "1",
    "1.",
    "1,111",
    "-1 ",
    "1/1/",
    "1 May ",
    "May 1",
    "A",
    "A ",
    "A-1.",
    "\n",
    "[",
    '"',
    "Tessaro ",
]


@pytest.mark.parametrize("name", ["json_syntax", "ranges", "entities"])
def test_no_text_takes_much_longer_than_another(name: str) -> None:
    """These run where they cannot be killed: nothing in them may grow faster than the text."""
    numbers = [{"max": 9e9, "unit": "kg", "word": "a"}, {"min": -9e9}]
    parameters = {"json_syntax": {}, "ranges": {"numbers": numbers, "dates": {}}, "entities": {"rows": TABLE}}[name]
    validator = REGISTRY.resolve({"name": name, **parameters})

    def seconds(opening: str, piece: str, length: int) -> float:
        text = f"{opening}{(piece * length)[: length - 5]}`x"
        best = math.inf
        for _ in range(3):
            began = time.perf_counter()
            judge(validator, text, {})
            best = min(best, time.perf_counter() - began)
        return best

    for opening, piece in itertools.product(["", FENCE], HOSTILE):
        # 8 times the text: 8 times the time if it is linear, 64 times if it is quadratic
        assert seconds(opening, piece, MAX_TEXT) < 24 * max(seconds(opening, piece, MAX_TEXT // 8), 1e-3), piece


def test_long_texts_are_not_looked_at() -> None:
    assert tag("x" * (MAX_TEXT + 1), "json_syntax").tag == "unknown"


def test_blocks() -> None:
    found = blocks(f"a\n~~~~ python title\nx\n~~~\ny\n~~~~\n  {FENCE}\nz\n{FENCE}\n{FENCE}c\nw")
    assert [(block.language, block.code, block.closed) for block in found] == [
        ("python", "x\n~~~\ny\n", True),
        ("", "z\n", True),
        ("c", "w\n", False),
    ]
