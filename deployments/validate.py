"""``scripts/validate FILE``: everything that can be known to be wrong before anything is started."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.preflight import Verdict, check, snapshot
from deployments.config import AppConfig, ConfigError, load_args
from deployments.config.conditioned import conditioned_problems
from deployments.config.serve_file import BUILDER, chain_applications, lint, read, unknown_overrides
from deployments.config.tokenizers import tokenizer_problems
from deployments.config.wishes import placement_problems, wishes
from deployments.evidence.build import evidence_problems
from deployments.names import deployment_names


def check_file(path: Path) -> tuple[list[AppConfig], list[str]]:
    """The applications of a Serve config file and every problem in it; the cluster is not asked."""
    try:
        content = read(path)
    except ConfigError as error:
        return [], error.problems
    problems = lint(content)
    configs: list[AppConfig] = []
    found = False
    for index, application in chain_applications(content):
        found = True
        config, own = _check_application(application, f"applications[{index}]", path.resolve().parent)
        problems += own
        if config is not None:
            configs.append(config)
    if not found and not problems:
        problems.append(f"{path}: no application with import_path: {BUILDER}")
    return configs, problems


def _check_application(application: Mapping[str, Any], where: str, folder: Path) -> tuple[AppConfig | None, list[str]]:
    args = application.get("args")
    if not isinstance(args, Mapping):
        return None, [f"{where}.args: required: the target, drafts and pools"]
    try:
        config = load_args(args, folder, f"{where}.args")
    except ConfigError as error:
        return None, error.problems
    problems = unknown_overrides(application, deployment_names(config), where)
    problems += tokenizer_problems(config, f"{where}.args")
    problems += conditioned_problems(config, f"{where}.args")
    return config, problems + evidence_problems(config, f"{where}.args")


def check_cluster(configs: list[AppConfig], address: str) -> list[Verdict]:
    """Compare all applications' pools with the cluster at ``address``."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        return check([wish for config in configs for wish in wishes(config)], snapshot())
    finally:
        ray.shutdown()


def table(verdicts: list[Verdict]) -> Table:
    """Pool and what it holds, wants, has, missing."""
    view = Table("pool", "wants", "has", "missing")
    for verdict in verdicts:
        missing = f"[red]{escape(verdict.missing)}[/red]" if verdict.missing else "[green]nothing[/green]"
        note = f"\n[yellow]{escape(verdict.note)}[/yellow]" if verdict.note else ""
        pool = f"{verdict.pool}\n[dim]{escape(verdict.holds)}[/dim]" if verdict.holds else verdict.pool
        view.add_row(pool, verdict.wants, verdict.has, missing + note)
    return view


def cluster_address(option: str | None) -> str | None:
    """Where a cluster is, if there is one: the option, RAY_ADDRESS, or a Ray started on this machine."""
    from ray._private.services import find_gcs_addresses

    if option or os.environ.get("RAY_ADDRESS"):
        return option or os.environ["RAY_ADDRESS"]
    found = sorted(find_gcs_addresses())
    return found[0] if len(found) == 1 else None


def main(argv: list[str] | None = None) -> int:
    """Print problems and the table of pools; 0 when all is well."""
    parser = argparse.ArgumentParser(prog="scripts/validate", description="Check a Serve config of this project.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--address", help="Ray cluster to check against (default: RAY_ADDRESS, or the local one)")
    parser.add_argument("--no-cluster", action="store_true", help="check the file only")
    options = parser.parse_args(argv)
    out, err = Console(), Console(stderr=True, soft_wrap=True)
    configs, problems = check_file(options.file)
    address = None if options.no_cluster or problems else cluster_address(options.address)
    if address is not None:
        try:
            verdicts = check_cluster(configs, address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            problems.append(f"cluster at {address}: cannot be reached: {str(error).splitlines()[0]}")
        else:
            out.print(table(verdicts))
            problems += placement_problems(verdicts)
    for problem in problems:
        err.print(f"[red]error:[/red] {problem}", highlight=False)
    if problems:
        return 1
    checked = "file and cluster" if address else "file; no cluster was asked"
    out.print(f"[green]ok[/green] {options.file} ({checked})", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
