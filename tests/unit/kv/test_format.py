"""docs/kv_block_format.md says what the code does."""

from pathlib import Path

from hw.kv.codes import Code
from tests.unit.kv.samples import manifest
from tests.unit.kv.test_manifest import GOLDEN, GOLDEN_DIGEST
from tests.unit.kv.test_prefix import GOLDEN_BLOCK, GOLDEN_TAIL, GOLDEN_TENANT, GOLDEN_TOKENS
from tests.unit.kv.test_record import GOLDEN_HEADER, SMALL

TEXT = (Path(__file__).parents[3] / "docs" / "kv_block_format.md").read_text()


def test_every_code_is_explained_once() -> None:
    listed = [line.split("`")[1] for line in TEXT.split("## Refusal codes")[1].splitlines() if line.startswith("| `")]
    assert listed == [code.value for code in Code]


def test_every_field_of_the_manifest_is_in_the_table() -> None:
    table = TEXT.split("## Manifest")[1].split("## Record")[0]
    for name, part in ((name, getattr(manifest(), name)) for name in manifest().__struct_fields__):
        for field in getattr(part, "__struct_fields__", ()):
            assert f"`{name}.{field}`" in table or f"`.{field}`" in table
        assert f"`{name}`" in table or f"`{name}." in table


def test_worked_example() -> None:
    example = TEXT.split("### Header and row table")[1].split("```")[1]
    lines = [line.split("  ") for line in example.strip().splitlines()[1:]]
    assert "".join(line[1] for line in lines).replace(" ", "") == GOLDEN_HEADER
    assert [int(line[0]) for line in lines] == list(range(0, len(GOLDEN_HEADER) // 2, 16))
    for said in (GOLDEN, GOLDEN_DIGEST, GOLDEN_BLOCK, GOLDEN_TAIL, GOLDEN_TOKENS, GOLDEN_TENANT, SMALL.digest().hex()):
        assert said in TEXT
