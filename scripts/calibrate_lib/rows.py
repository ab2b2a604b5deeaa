"""The table behind a report: a row for each setting, from what is kept of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.calibrate_lib.figures import Figures, figures
from scripts.calibrate_lib.floors import Candidate, Floor, Recommendation, recommend
from scripts.calibrate_lib.item_sets import Item
from scripts.calibrate_lib.knobs import REFERENCES, Setting
from scripts.calibrate_lib.quality import Sampling, pairs_of
from scripts.calibrate_lib.speed import SpeedFigures
from scripts.calibrate_lib.store import Round, Store

# Beside the floor that was asked for: what a setting may cost in other terms.
OTHER_FLOORS = (
    Floor("changed", 0.01),
    Floor("changed", 0.1),
    Floor("agreement", 0.9),
    Floor("score", -0.02),
    Floor("perplexity", 1.01),
    Floor("similarity", 0.98),
)


@dataclass(frozen=True)
class Row:
    """One setting: over all sets, of each, and its speed. Several names may share one measurement."""

    setting: Setting
    all: Figures
    by_set: Mapping[str, Figures]
    speed: SpeedFigures

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.setting.name, self.all, self.speed.to_lossless)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "setting": self.setting.name,
            "policy": self.setting.spec if self.setting.policy is not None else None,
            "all": asdict(self.all),
            "by_set": {name: asdict(found) for name, found in self.by_set.items()},
            "speed": asdict(self.speed),
        }


def rows(
    settings: Sequence[Setting],
    sets: Mapping[str, Sequence[Item]],
    sampling: Sampling,
    store: Store,
    rounds: Sequence[Round],
) -> list[Row]:
    """Plain, lossless, then every setting, as far as they were measured on all the sets that lossless was."""
    whole = set(pairs_of(REFERENCES[1], sets, sampling, store))
    found = []
    for setting in (*REFERENCES, *settings):
        pairs = pairs_of(setting, sets, sampling, store)
        if not whole or set(pairs) != whole:
            continue
        name = _measured_name(setting, settings)
        found.append(
            Row(
                setting,
                figures([pair for some in pairs.values() for pair in some]),
                {each: figures(some) for each, some in pairs.items()},
                SpeedFigures.of(rounds, name),
            )
        )
    return found


def recommendations(table: Sequence[Row], floor: Floor) -> list[Recommendation]:
    """For the floor asked for, then for others; of the settings swept, not of the presets."""
    swept = [row.candidate for row in table if row.setting.swept]
    return [recommend(swept, each) for each in (floor, *(other for other in OTHER_FLOORS if other != floor))]


def _measured_name(setting: Setting, settings: Sequence[Setting]) -> str:
    """Under which name its speed was measured: the first setting that says the same."""
    if setting.policy is None or not setting.lossy:
        return REFERENCES[0 if setting.policy is None else 1].name
    return next(other.name for other in settings if other.given == setting.given)
