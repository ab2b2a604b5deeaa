"""What was answered: one line of JSON for each request, written as it comes, so that a run can go on where it stopped."""

import hashlib
from pathlib import Path

import msgspec


class Draft(msgspec.Struct, frozen=True):
    """A draft as the trace shows it."""

    source: str
    text: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer."""

    system: str
    question: str
    wording: int
    text: str
    seconds: float
    tokens: int = 0  # completion tokens
    accepted: int = 0  # of them drafted
    cpu_seconds: float | None = None  # of the target's processes; None behind a URL
    outcome: str = ""  # of the drafts: consensus, leaning, divergence, …
    decision: str = ""
    drafts: tuple[Draft, ...] = ()
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.system, self.question, self.wording

    @property
    def passes(self) -> int:
        """Decoding steps of the target, and one more where it scored drafts or wrote with them in view."""
        return self.tokens - self.accepted + (self.decision in ("likeliest", "unscored"))


class Store:
    """The file of a run. Its name holds what the answers depend on, so runs that differ never mix."""

    def __init__(self, folder: Path, settings: object) -> None:
        digest = hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:12]
        self.path = folder / f"answers-{digest}.jsonl"
        self.records: list[Record] = []
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                try:
                    self.records.append(msgspec.json.decode(line, type=Record))
                except msgspec.MsgspecError:
                    break  # the run ended in the middle of this line

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return any(record.key == key for record in self.records)

    def forget(self) -> None:
        """Start over."""
        self.records = []
        self.path.unlink(missing_ok=True)

    def begin(self) -> None:
        """Write what is known afresh: without half a line at the end, nothing is ever appended to one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in self.records))

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
