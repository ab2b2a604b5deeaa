"""A preset in a config file: everything else of the file stays, a broken result is never written."""

from pathlib import Path

import pytest
import yaml

from deployments.config.presets import SHIPPED
from scripts.calibrate_lib.presets import PresetError, write_preset

ROOT = Path(__file__).resolve().parents[2]
POLICY = {"name": "nkl", "delta": 0.02, "mask": 0.8}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Folders that a config may name; no model is loaded."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    return tmp_path


def config(folder: Path, chain: str, tail: str = "") -> Path:
    path = folder / "config.yaml"
    path.write_text(
        f"""# head
applications:
  - name: chain   # a name
    import_path: deployments.app:build
    args:
      target: {{name: t, model: target, pool: cpu}}   # flow
      pools:
        cpu: {{cpus: 1}}
{chain}{tail}"""
    )
    return path


CHAINS = {
    "no chain": "",
    "chain without presets": "      chain:\n        enabled: true   # on\n        tokens: 4       # few\n",
    "nested last": "      chain:\n        enabled: true\n        tenants:\n          header: x-user   # who\n\n      # after\n",
    "presets in flow": "      chain:\n        presets: {other: {name: lossless}}   # ours\n",
    "presets empty": "      chain:\n        presets: {}\n        enabled: true\n",
    "presets null": "      chain:\n        presets:\n        enabled: true\n",
    "presets in block": "      chain:\n        presets:\n          other:\n            name: nkl\n            delta: 0.1  # much\n        enabled: true\n",
    "replaced": "      chain:\n        presets:\n          mine:\n            name: nkl\n            delta: 0.1\n          other: {name: lossless}\n",
    "replaced in flow": "      chain: {presets: {mine: {name: nkl, delta: 0.1}, other: {name: lossless}}, enabled: false}\n",
    "chain in flow": "      chain: {enabled: true, sources: [suffix]}  # short\n",
    "chain null": "      chain:\n",
}


@pytest.mark.parametrize("tail", ["", "      limits: {max_ongoing_requests: 8}\n", "# the end"])
@pytest.mark.parametrize("kind", CHAINS)
def test_only_the_preset_changes(models: Path, kind: str, tail: str) -> None:
    path = config(models, CHAINS[kind], tail)
    text, before = path.read_text(), yaml.safe_load(path.read_text())
    backup = write_preset(path, "mine", POLICY)
    after = yaml.safe_load(path.read_text())
    chain = after["applications"][0]["args"]["chain"]
    assert chain["presets"].pop("mine") == POLICY
    old = (before["applications"][0]["args"].get("chain") or {}).copy()
    old_presets = {name: spec for name, spec in (old.pop("presets", None) or {}).items() if name != "mine"}
    assert (chain.pop("presets") or {}) == old_presets
    assert chain == old
    after["applications"][0]["args"].pop("chain")
    before["applications"][0]["args"].pop("chain", None)
    assert after == before
    assert backup.read_text() == text
    comments = [line.split("#")[1] for line in text.splitlines() if "#" in line]
    assert [line.split("#")[1] for line in path.read_text().splitlines() if "#" in line] == comments


def test_the_shipped_file_keeps_every_line(models: Path) -> None:
    path = ROOT / "ray_config.yaml"
    copy = models / "ray_config.yaml"
    copy.write_text(path.read_text())
    write_preset(copy, "calibrated", POLICY)
    old, new = path.read_text().splitlines(), copy.read_text().splitlines()
    added = [line for line in new if line not in old]
    assert len(added) == 1
    assert [line for line in new if line not in added] == old
    assert "calibrated" in added[0]


def test_a_second_time_replaces_it_and_keeps_both_old_files(models: Path) -> None:
    path = config(models, CHAINS["chain without presets"])
    first = write_preset(path, "mine", POLICY)
    second = write_preset(path, "mine", SHIPPED["chat"])
    assert first != second
    assert first.is_file()
    assert yaml.safe_load(path.read_text())["applications"][0]["args"]["chain"]["presets"] == {"mine": SHIPPED["chat"]}
    assert path.stat().st_mode == second.stat().st_mode


@pytest.mark.parametrize(
    ("name", "policy", "why"),
    [("mine", {"name": "nkl", "delta": 2.0}, "delta"), ("lossless", POLICY, "name of a policy")],
)
def test_what_would_not_be_valid_is_not_written(models: Path, name: str, policy: dict[str, object], why: str) -> None:
    path = config(models, CHAINS["chain without presets"])
    text = path.read_text()
    with pytest.raises(PresetError, match=why):
        write_preset(path, name, policy)
    assert path.read_text() == text
    assert not list(models.glob("*.bak*"))
    assert not list(models.glob(".config*"))


def test_shared_nodes_are_left_to_the_operator(models: Path) -> None:
    """Where two places of the file are one, a change of the one changes the other."""
    path = config(models, "      chain: {presets: &p {other: {name: lossless}}}\n", "      limits: {}\nx-presets: *p\n")
    text = path.read_text()
    with pytest.raises(PresetError, match="by hand"):
        write_preset(path, "mine", POLICY)
    assert path.read_text() == text


@pytest.mark.parametrize("content", ["applications: []\n", "- 1\n", "applications: [\n"])
def test_a_file_without_the_application_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(PresetError, match=r"config\.yaml"):
        write_preset(path, "mine", POLICY)
    with pytest.raises(PresetError, match="no such file"):
        write_preset(tmp_path / "other.yaml", "mine", POLICY)
