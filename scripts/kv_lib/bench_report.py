"""The result of ``scripts/kv bench`` as JSON, as Markdown and for a terminal. All times in it are milliseconds."""

import json
from pathlib import Path
from typing import Any

from scripts.profile_lib.report import Part, rounded, section_lines, table

__all__ = ["Part", "parts", "table", "write"]

SPREAD = "median (min to p90)"
FASTER, SHARE = 100, 0.6  # what the import must hold: times its prefill, share of a copy's speed


def parts(result: dict[str, Any]) -> list[Part]:
    """Tables of the sections that ran."""
    found = []
    if "import" in result:
        found.append(_import(result["import"]))
    if "pages" in result:
        found.append(_pages(result["pages"]))
    if "sizes" in result:
        found.append(_sizes(result["sizes"]))
    if "digests" in result:
        found.append(_digests(result["digests"]))
    return found


def _import(section: dict[str, Any]) -> Part:
    payload, slot = (f"{section[name] / 2**20:.1f} MiB" for name in ("payload_bytes", "slot_bytes"))
    meanings = {
        "memcpy": f"plain copy of the {payload} that travel",
        "memcpy_slot": f"plain copy of the {slot} that the slot takes ({section['slot_dtype']})",
        "memcpy_traffic": "plain copy that reads and writes as many bytes together as the import does",
        "write_kv": "into the slot, converting, and nothing else",
        "import": "the draft's import: reference, checks, into the slot",
        "export": "the target's export: out of the pages into shared memory, header, publication",
        "both": "export and import",
        "prefill": "the draft reads the prompt itself",
    }
    rows = [
        [
            name,
            spread(section[name]["ms"]),
            *(share(section[name].get(f"of_{base}")) for base in ("memcpy", "memcpy_slot", "memcpy_traffic")),
            times(section[name].get("of_prefill")),
            meaning,
        ]
        for name, meaning in meanings.items()
    ]
    copies = section["copies"]
    note = (
        f"{section['tokens']} tokens, bfloat16 pages of {section['block_tokens']} tokens ({section['packing']}). Copies of the "
        f"payload: export {copies['export']}, between {copies['transport']} (a reader sees what the producer writes: "
        f"{copies['reader_sees_writes']}), import {copies['import']}."
    )
    headings = (
        "What",
        f"ms: {SPREAD}",
        "of memcpy",
        "of its slot's",
        "of its traffic's",
        "faster than prefill",
        "Which is",
    )
    return Part("A prompt's KV on its way", headings, rows, note)


def _pages(cells: list[dict[str, Any]]) -> Part:
    kinds = ("read", "write", "K", "V")
    headings = ("Packing", "Block", "memcpy ms", *(f"{kind}: ms, of memcpy" for kind in kinds))
    rows = [
        [
            cell["packing"],
            str(cell["block_tokens"]),
            spread(cell["memcpy"]["ms"]),
            *(
                f"{spread(cell[kind]['ms'])}, {share(cell[kind]['of_memcpy' + ('_half' if kind in 'KV' else '')])}"
                for kind in kinds
            ),
        ]
        for cell in cells
    ]
    note = (
        "read: out of scattered pages; write: into them; K and V: the halves of read, against a copy of half the bytes."
    )
    return Part(f"Pages of {cells[0]['tokens']} tokens or so, by tokens of a block", headings, rows, note)


def _sizes(section: dict[str, Any]) -> Part:
    names = ("export", "import", "both")
    rows = [[str(row["tokens"]), *(spread(row[name]["ms"]) for name in names)] for row in section["rows"]]
    fits = "; ".join(
        f"{name} {section[name]['fixed_ms'] * 1e3:.0f} us + bytes at {section[name]['gb_per_s']:.1f} GB/s"
        f" (of {', '.join(map(str, section[name]['through']))} tokens)"
        for name in names
    )
    note = f"Lines through them: {fits}. A partial block leaves the pages by another way than whole ones."
    return Part("By number of tokens", ("Tokens", *(f"{name} ms" for name in names)), rows, note)


def _digests(section: dict[str, Any]) -> Part:
    rows = [
        [what, *(f"{spread(section[f'{mode}:{name}']['ms'])}, {share(section[f'{mode}:{name}']['of_memcpy'])}"
                 for name in ("export", "import", "both"))]
        for mode, what in (("off", "shared memory, no digests"), ("on", "inside the message, BLAKE3 of every row"))
    ]  # fmt: skip
    headings = ("Digests", *(f"{name}: ms, of memcpy" for name in ("export", "import", "both")))
    return Part(f"Digests off and on, {section['tokens']} tokens", headings, rows)


def spread(value: dict[str, float]) -> str:
    digits = 3 if value["median"] < 1 else 2 if value["median"] < 100 else 0
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}-{value['p90']:.{digits}f})"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}x"


def held(section: dict[str, Any]) -> list[str]:
    """What must hold of the import, and whether it does, in sentences."""
    figures = section["import"]
    faster, same, traffic = figures["of_prefill"], figures["of_memcpy"], figures["of_memcpy_traffic"]
    return [
        f"The import of {section['tokens']} tokens is {faster:.0f} times faster than the draft's prefill of them "
        f"(wanted: {FASTER}; {'held' if faster >= FASTER else 'not held'}).",
        f"It runs at {same:.2f} of memcpy of the bytes that travel (wanted: {SHARE}; {'held' if same >= SHARE else 'not held'}). "
        f"The slot takes {section['slot_bytes'] / section['payload_bytes']:.0f} times as many bytes as travel; beside a copy with "
        f"as many bytes read and written together it is {traffic:.2f}.",
    ]


def markdown(result: dict[str, Any]) -> str:
    """One table for each part, after what a reader must know to judge it."""
    load, probe = result["other_load"], result["speed_probe_ms"]
    lines = ["# KV plane", "", f"`scripts/kv bench` at commit `{result['commit']}` on {result['machine']}.", ""]
    lines += [", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".", ""]
    lines += [
        f"- One thread; {result['repetitions']} repetitions of {result['calls']} turns, interleaved; draft {result['draft']}.",
        f"- Other programs used {load['before']:.0%} of the machine before and {load['after']:.0%} after. A fixed piece of work took "
        f"{probe['before']:.1f} ms before and {probe['after']:.1f} ms after.",
        "- `of memcpy`: time of a plain copy over the time of this; 1.00 is as fast as copying can be.",
    ]
    if result["engine_packing"]:
        lines.append(f"- vLLM's CPU engine packs bfloat16 as {result['engine_packing']} on this machine.")
    if "import" in result:
        lines += [f"- {sentence}" for sentence in held(result["import"])]
    for part in parts(result):
        lines += section_lines(part)
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], path: Path) -> Path:
    """Write JSON and, beside it, Markdown; returns the Markdown's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(markdown(result), encoding="utf-8")
    return page
